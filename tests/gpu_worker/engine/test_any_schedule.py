"""Any requests at any time, by seed: answers are those of each alone, or end early for a reason that is told."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
from engine_rig import (
    LAYOUT,
    ONE_QUANTUM,
    Record,
    Rig,
    every_small_policy,
    make_model,
    pool_of,
    random_prompt,
)
from moody_store import MoodyStore
from waiting import wait_until

from gpu_worker.caches import HotCacheSize
from gpu_worker.errors import ArenaFull, NeverFits, StoreUnavailable
from gpu_worker.records import (
    Budget,
    CompleteEvent,
    ErrorEvent,
    Event,
    FinishReason,
    GenerationRequest,
    PromptEvent,
    SamplingParams,
    TokenEvent,
)

MODEL = make_model(eos_token_ids=(0, 5))
POLICIES = every_small_policy()
NAMES = sorted(POLICIES)
# About blocks, slabs, chunks and pages.
LENGTHS = (1, 2, 3, 15, 16, 17, 33, 63, 64, 65, 95, 97, 127, 128, 129, 191, 193)
VOCAB = 97
MAX_MODEL_LEN = 320


@dataclass
class FewTokens:
    """Lets an answer go on with few tokens, which follow from those before; its masks are late at times."""

    seed: int
    length: int
    moods: random.Random
    taken: list[int] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.moods.random() < 0.6

    @property
    def is_complete(self) -> bool:
        return len(self.taken) >= self.length

    def take(self, token_id: int) -> None:
        self.taken.append(token_id)

    def allowed(self, vocab_size: int, end_token_ids: Collection[int]) -> npt.NDArray[np.int32]:
        draw = random.Random(f"{self.seed} {self.taken}")
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[draw.sample(range(6, vocab_size), 6)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def sampling(draw: random.Random) -> SamplingParams:
    def maybe(chance: float, value: float, otherwise: float) -> float:
        return value if draw.random() < chance else otherwise

    has_bias, has_stops = draw.random() < 0.2, draw.random() < 0.2
    return SamplingParams(
        max_tokens=draw.choice((1, 2, 8, 20, 33, 65)),
        temperature=maybe(0.3, 0.8, 0.0),
        top_k=int(maybe(0.2, 5, 0)),
        top_p=maybe(0.2, 0.5, 1.0),
        min_p=maybe(0.1, 0.05, 0.0),
        seed=draw.randrange(1000),
        repetition_penalty=maybe(0.2, 1.3, 1.0),
        presence_penalty=maybe(0.2, 0.7, 0.0),
        frequency_penalty=maybe(0.2, 0.4, 0.0),
        stop_token_ids=tuple(draw.sample(range(VOCAB), 3)) if has_stops else (),
        ignore_eos=draw.random() < 0.8,
        min_tokens=int(maybe(0.2, 1, 0)),
        logprobs=draw.choice((None, None, None, 0, 5)),
        prompt_logprobs=draw.choice((None,) * 8 + (2,)),
        logit_bias=tuple((token, draw.choice((-100.0, 3.0))) for token in draw.sample(range(VOCAB), 5))
        if has_bias
        else (),
    )


def any_request(draw: random.Random, name: str, documents: list[tuple[int, ...]]) -> GenerationRequest:
    own = random_prompt(draw.choice(LENGTHS), draw.randrange(10**6))
    prompt = own if draw.random() < 0.5 else (*draw.choice(documents), *own[:20])
    params, length = sampling(draw), len(prompt)
    if draw.random() < 0.15:
        params = replace(params, max_tokens=MAX_MODEL_LEN - length)
    tokens = draw.choice((2, 7, 16, 34, 64, max(2, length - 1), length + 9))
    is_late = params.prompt_logprobs is None and draw.random() < 0.15
    return GenerationRequest(
        name,
        prompt,
        params,
        draw.choice(("full", *draw.sample(NAMES, 3))),
        Budget(share=0.2) if draw.random() < 0.3 else Budget(tokens=tokens),
        num_prefill_tokens=draw.randrange(1, length + 1) if is_late else 0,
        prefix_salt=draw.choice((b"", b"", b"key")),
        session_id=draw.choice(("", "", "session")),
        priority=draw.choice((0, 0, 0, -1, 2)),
        constraint=FewTokens(draw.randrange(1000), draw.randrange(1, 30), draw)
        if draw.random() < 0.12
        else None,
    )


def anew(one: GenerationRequest) -> GenerationRequest:
    """With a constraint that has taken nothing."""
    constraint = one.constraint
    return replace(
        one, constraint=replace(constraint, taken=[]) if isinstance(constraint, FewTokens) else None
    )


def check(one: GenerationRequest, record: Record, alone: Record, is_aborted: bool) -> None:
    told, expected = record.tokens, alone.tokens
    assert told == expected[: len(told)], one
    assert sum(isinstance(event, CompleteEvent | ErrorEvent) for event in record.events) == 1
    match record.last, alone.last:
        case ErrorEvent(error=error), ErrorEvent(error=other):
            assert type(error) is type(other), one
        case ErrorEvent(error=error), _:
            assert isinstance(error, NeverFits | ArenaFull | StoreUnavailable), one
        case CompleteEvent(finish_reason=FinishReason.ABORT), _:
            assert is_aborted, one
        case CompleteEvent(finish_reason=reason, stop_token_id=stop), CompleteEvent(
            finish_reason=other_reason, stop_token_id=other_stop
        ):
            # Only who fills the arena, or the slots, alone ends earlier than alone with more room.
            assert (reason, stop) == (other_reason, other_stop) or reason is FinishReason.LENGTH, one
            assert told == expected or reason is FinishReason.LENGTH, one
            found = _numbers(record.events)
            np.testing.assert_allclose(found, _numbers(alone.events)[: len(found)], atol=2e-3)
        case other:
            raise AssertionError(f"{one} ends with {other}")


def _numbers(events: list[Event]) -> list[float]:
    """Log probabilities, of the prompt first."""
    numbers: list[float] = []
    for event in events:
        match event:
            case PromptEvent():
                numbers += event.logprobs.ravel().tolist()
            case TokenEvent(logprob=logprob) if logprob is not None:
                numbers.append(logprob)
    return numbers


def check_schedule(
    seed: int, num_requests: int, monkeypatch: pytest.MonkeyPatch, page_bytes: int | None = None
) -> None:
    draw = random.Random(f"schedule {seed}")
    hot = draw.choice((HotCacheSize(), HotCacheSize(tokens=1), HotCacheSize(share=0.2)))
    alike = {
        "prefill_chunk": draw.choice((16, 32, 64)),
        "full_layers": draw.choice((0, 0, 1)),
        "policies": POLICIES,
        "trains_indexes": draw.random() < 0.4,
        "max_model_len": MAX_MODEL_LEN,
    }
    # Slots for so few tokens ahead that answers ask for more.
    monkeypatch.setattr("gpu_worker.state.sequence.AHEAD", draw.choice((1, 16, 64)))
    store = MoodyStore(LAYOUT, draw.choice((450, 600, 900)), draw.choice((16, 64)), seed)
    rig = Rig(
        MODEL,
        client=store,  # type: ignore[arg-type]
        max_num_seqs=draw.choice((1, 2, 4, 6)),
        # In pages lies much more than slots.
        slot_bytes=pool_of(draw.choice((6, 8, 12))) + (page_bytes or 0) * 24,
        page_bytes=page_bytes,
        hot_cache=hot,
        reuses_prefixes=True,
        itl_seconds=draw.choice((ONE_QUANTUM, 0.02)),
        runs_ahead=draw.random() < 0.7,
        **alike,  # type: ignore[arg-type]
    )
    documents = [random_prompt(length, length) for length in (90, 128, 200)]
    asked = [any_request(draw, f"{number}", documents) for number in range(num_requests)]
    waiting, aborted = [*asked], set[str]()

    def is_over() -> bool:
        if waiting and draw.random() < 0.3:
            rig.submit(anew(waiting.pop(0)))
        if rig.records and draw.random() < 0.02:
            aborted.add(name := draw.choice([*rig.records]))
            rig.engine.abort(name)
        store.tick()
        rig.engine.step()
        # Also while a step is on its way.
        if draw.random() < 0.2:
            rig.engine.check_store()
        return not (waiting or rig.engine.has_work)

    # Between two looks at a prefix that loads many steps have nothing to do.
    wait_until(is_over, poll=0.0)
    store.calm()
    rig.engine.check_store()
    rig.store = store
    rig.check_empty()
    for one in asked:
        alone = Rig(MODEL, max_num_seqs=1, **alike)  # type: ignore[arg-type]
        expected = alone.run(replace(anew(one), shares_prefix=False))[0]
        check(one, rig.records[one.request_id], expected, one.request_id in aborted)


# In the last two the store falls silent within a step.
@pytest.mark.parametrize(("seed", "num_requests"), [*((seed, 8) for seed in range(5)), (77, 16), (87, 16)])
def test_answers_are_those_of_requests_alone(
    seed: int, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_schedule(seed, num_requests, monkeypatch)


@pytest.mark.parametrize(("seed", "page_bytes"), [(200, 4096), (201, 16384), (202, 32768), (203, 16384)])
def test_where_all_memory_is_pages_answers_are_those_of_requests_alone(
    seed: int, page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that two had would change an answer, and one that is missing ends the process."""
    check_schedule(seed, 12, monkeypatch, page_bytes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5, 105))
def test_answers_are_those_of_requests_alone_of_many_seeds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_schedule(seed, 16, monkeypatch)
