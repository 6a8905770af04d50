"""Reports to a request about the tokens that its steps attended."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest
from engine_rig import NUM_KV_HEADS, Record, Rig, request
from torch import Tensor

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.request import Status
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.recall import Candidates
from gpu_worker.records import AttentionEvent, GenerationRequest
from gpu_worker.runner.steps import attention_views
from gpu_worker.runner.steps.attention_views import AttentionViews, bucket_size

PROMPT, BUDGET, OTHER = 150, 40, 60


@pytest.fixture
def at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_views, "INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(attention_views, "REST", 0)


def watched(policy: str, max_tokens: int = 6, name: str = "one") -> GenerationRequest:
    return replace(request(name, policy, BUDGET, prompt=PROMPT, max_tokens=max_tokens), attention=True)


def told(record: Record) -> list[AttentionEvent]:
    return [event for event in record.events if isinstance(event, AttentionEvent)]


def counts(event: AttentionEvent, data: bytes) -> npt.NDArray[np.uint16]:
    """[layers, heads, buckets]."""
    return np.frombuffer(data, "<u2").reshape(len(event.layers), event.kv_heads, -1)


@pytest.mark.usefixtures("at_every_step")
@pytest.mark.parametrize("hot_cache", [HotCacheSize(), HotCacheSize(tokens=30)], ids=["resident", "misses"])
def test_what_is_told_of_a_recall_step_is_what_its_policy_selected(
    hot_cache: HotCacheSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By layer and step.
    chosen: dict[tuple[int, int], list[list[int]]] = {}
    select = PQCache.select

    def spy(self: PQCache, index: object, candidates: Candidates, *rest: int) -> Tensor:
        found = select(self, index, candidates, *rest)  # type: ignore[arg-type]
        for lane, end in enumerate(candidates.end.tolist()):
            # The other one is far shorter.
            if end > OTHER:
                chosen[candidates.layer, len([key for key in chosen if key[0] == candidates.layer])] = found[
                    lane
                ].tolist()
        return found

    monkeypatch.setattr(PQCache, "select", spy)
    rig = Rig(hot_cache=hot_cache, full_layers=1)
    first, other = rig.run(
        watched("pqcache"), request("other", "pqcache", BUDGET, prompt=OTHER, max_tokens=9)
    )
    assert not told(other)
    events = told(first)
    # The first token is the prompt's; what the last step attended was not told before the end.
    assert [(event.step, event.context_tokens) for event in events] == [(n, PROMPT + n) for n in range(1, 5)]
    for event, step in zip(events, range(4), strict=True):
        assert (event.layers, event.dense_layers, event.kv_heads) == ((1, 2), 1, NUM_KV_HEADS)
        assert (event.bucket_tokens, event.family, event.policy) == (1, "recall", "pqcache")
        attended = counts(event, event.attended)
        assert attended.max() == 1
        assert attended.sum(axis=2).tolist() == [[BUDGET + 1] * NUM_KV_HEADS] * 2
        for layer in range(2):
            selected = chosen[layer, step]
            for head in range(NUM_KV_HEADS):
                found = set(np.nonzero(attended[layer, head])[0].tolist())
                # Sinks, and a window that ends with the new token.
                assert {0, 1, 2, 3, PROMPT + step}.isdisjoint(selected[head])
                assert found > {position for position in selected[head] if position >= 0}
                assert found > {0, 1, 2, 3, PROMPT + step}
        if hot_cache.is_auto:
            assert (event.on_device, event.bytes_moved) == (b"", 0)
        else:
            on_device = counts(event, event.on_device)
            assert (on_device >= attended).all()
            # Sinks and window are part of the budget.
            assert (on_device.sum(axis=2) <= BUDGET + 30 + 1).all()
            assert event.host_tokens == event.context_tokens
    assert hot_cache.is_auto or events[-1].bytes_moved > 0


@pytest.mark.usefixtures("at_every_step")
def test_what_a_retain_policy_keeps_is_attended_and_the_rest_is_nowhere() -> None:
    (record,) = Rig().run(watched("streaming_llm"))
    last = told(record)[-1]
    attended = counts(last, last.attended)
    assert last.attended == last.on_device
    assert (last.family, last.host_tokens) == ("retain", 0)
    kept = [*range(4), *range(last.context_tokens - BUDGET + 3, last.context_tokens)]
    for head in attended.reshape(-1, last.context_tokens):
        assert np.nonzero(head)[0].tolist() in (kept, [*range(4), kept[4] - 1, *kept[4:]])


@pytest.mark.usefixtures("at_every_step")
def test_who_attends_everything_is_told_so() -> None:
    (record,) = Rig().run(watched("full"))
    events = told(record)
    assert [event.step for event in events] == [1, 2, 3, 4]
    assert {(event.attended, event.on_device, event.family) for event in events} == {(b"", b"", "dense")}


def test_looks_take_a_fiftieth_of_the_time_at_most() -> None:
    rig = Rig()
    rig.submit(request("long", "pqcache", BUDGET, prompt=PROMPT))
    sequence = rig.step_to("long", Status.DECODE, 3)
    sequence.request = replace(sequence.request, attention=True)
    caches = rig.runner.caches
    # Each reading takes 10 ms: so long a look takes, and so long it takes to tell of it at the next step.
    readings = count(step=0.01)
    views = AttentionViews(caches, NUM_KV_HEADS, lambda: next(readings))
    batch = caches.batch([sequence])
    num_told = sum(len(views.after_step(batch)) for _ in range(400))
    assert num_told >= 3
    assert views.spent_seconds == pytest.approx(0.02 * num_told)
    assert views.spent_seconds <= 0.02 * next(readings) + 0.02


@pytest.mark.usefixtures("at_every_step")
def test_several_are_looked_at_in_turns() -> None:
    rig = Rig()
    records = rig.run(*(watched("pqcache", 20, name) for name in "abc"))
    for record in records:
        steps = [event.step for event in told(record)]
        assert max(np.diff(steps)) <= 3
        assert max(steps) >= 17


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(1, 1), (512, 1), (513, 2), (1025, 4), (131_072, 256), (131_073, 512)]
)
def test_buckets_are_powers_of_two(num_tokens: int, bucket: int) -> None:
    assert bucket_size(num_tokens) == bucket
    assert -(-num_tokens // bucket) <= attention_views.MAX_BUCKETS
