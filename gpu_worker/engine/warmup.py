"""Requests of the engine's own before the first user's: what those need is compiled, planned and captured by then."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.graphs import MAX_GRAPHS
from gpu_worker.engine.pace import NUM_SAMPLES
from gpu_worker.engine.short_batch import buckets_within
from gpu_worker.errors import CapacityError, WorkerError
from gpu_worker.records import (
    CompleteEvent,
    EngineInfo,
    ErrorEvent,
    Event,
    GenerationRequest,
    ProgressEvent,
    SamplingParams,
    TokenEvent,
)
from gpu_worker.state.batch import Buckets

logger = logging.getLogger(__name__)

LIMIT_SECONDS = 120.0
# Prompts of a few words, of a chat, and of a length that leaves no rest where attention is computed in units.
WORDS, CHAT, UNITS = 16, 300, 1024
# So far below the size of its buffers, a power of two, a prompt's last chunk has whole units and a rest.
REST = 300
MAX_PROMPT = 1 << 14
# A batch of a new shape decodes as it is, then is captured, then replayed.
NUM_STEPS = 3
# Of an answer at most, while others join its batch.
MAX_TOKENS = 512
DENSE = "full"
PAUSE_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Stage:
    """Requests of one policy and prompt length, which decode together. sizes: of the batch, one after the other, as
    more join. num_steps: of each size. max_tokens: of each answer."""

    policy: str
    num_prompt: int
    max_tokens: int = 1 + NUM_STEPS
    sizes: tuple[int, ...] = (1,)
    num_steps: int = NUM_STEPS


def stages(info: EngineInfo, prefill_chunk: int, buckets: Buckets) -> list[Stage]:
    """What a warm-up does, the likeliest first. On a GPU: short prompts and batches of every size that is captured,
    and prompts of every length that is planned by itself. On a CPU, which compiles nothing: one short request."""
    policy, longest = info.default_policy, info.max_model_len
    found = [Stage(policy, WORDS)]
    if info.device != "cpu":
        # As it is, then captured; the largest first, whose memory serves the others.
        for size in reversed(buckets_within(min(prefill_chunk, longest))):
            found += [Stage(DENSE, min(size, prefill_chunk), max_tokens=1, num_steps=0)] * 2
        sizes = _batch_sizes(info.max_num_seqs, buckets)
        for each in dict.fromkeys((policy, DENSE)):
            found.append(Stage(each, CHAT, min(MAX_TOKENS, longest - CHAT), sizes))
        lengths = _prompt_lengths(min(longest - 1 - NUM_STEPS, MAX_PROMPT), prefill_chunk)
        selecting = [
            length for length in (CHAT, *lengths) if 2 * info.default_budget.resolve(length) <= length
        ]
        # With room for an answer of any length: where memory is scarce it has fewer slots than tokens.
        found += [Stage(policy, length, longest - length) for length in selecting[:1]]
        found += [Stage(policy, length) for length in lengths]
        # The engine's measure of a step is that of a captured one again.
        found += [Stage(policy, CHAT, 1 + NUM_SAMPLES, num_steps=NUM_SAMPLES)]
    return [
        each
        for each in found
        if each.max_tokens > each.num_steps and each.num_prompt + each.max_tokens <= longest
    ]


def _batch_sizes(max_num_seqs: int, buckets: Buckets) -> tuple[int, ...]:
    """Those that batches are padded to; as many as stay captured for two policies, beside prompts of other lengths."""
    sizes = {min(buckets.lanes(size), max_num_seqs) for size in range(1, max_num_seqs + 1)}
    return tuple(sorted(sizes)[: MAX_GRAPHS // 3])


def _prompt_lengths(most: int, prefill_chunk: int) -> list[int]:
    """Above a chat's; one in each size of a prompt's buffers."""
    lengths, buffer = {UNITS, prefill_chunk + REST}, 2 * UNITS
    while buffer // 2 < most:
        lengths.add(min(buffer - REST, most))
        buffer *= 2
    return sorted(length for length in lengths if length <= most)


class _Answer:
    """What came of one request."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.num_tokens = 0
        self._error: Exception | None = None

    def take(self, event: Event) -> None:
        match event:
            case TokenEvent():
                self.num_tokens += 1
            case ErrorEvent(error):
                self._error = error
            case ProgressEvent() | CompleteEvent():
                pass

    def check(self) -> None:
        """Raises what ended the request."""
        if self._error is not None:
            raise self._error


class WarmUp:
    """Drives an engine through `stages`. Afterwards none of its requests is left, nor what they stored and counted."""

    def __init__(
        self,
        engine: Engine,
        prefill_chunk: int,
        report: Callable[[int, int], None],
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        """report: gets how many stages are done, and of how many. limit_seconds: what is not done by then is left
        out."""
        self._engine = engine
        self._stages = stages(engine.info, prefill_chunk, engine.caches.buckets)
        self._report = report
        self._limit_seconds = limit_seconds

    def run(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """On the thread that drives the engine, before its first request. A failure ends it, and is logged.

        is_stopped: asked before every step.
        """
        begun = time.monotonic()

        def is_over() -> bool:
            return is_stopped() or time.monotonic() - begun > self._limit_seconds

        try:
            for number, stage in enumerate(self._stages):
                self._report(number, len(self._stages))
                self._run(stage, is_over)
            while not (is_over() or self._engine.offloader.is_settled):
                time.sleep(PAUSE_SECONDS)
        except WorkerError as error:
            logger.warning("the warm-up failed, first requests may take longer: %s", error)
        except Exception:
            logger.warning("the warm-up failed, first requests may take longer", exc_info=True)
        finally:
            self._engine.reset_counts()
        self._report(len(self._stages), len(self._stages))
        logger.info("the warm-up took %.1f s", time.monotonic() - begun)

    def _run(self, stage: Stage, is_over: Callable[[], bool]) -> None:
        answers: list[_Answer] = []
        try:
            for size in stage.sizes:
                for number in range(len(answers), size):
                    answers.append(_Answer(f"warm-up-{number}"))
                    self._engine.submit(self._request(stage, answers[-1].request_id), answers[-1].take)
                while min(answer.num_tokens for answer in answers) <= stage.num_steps:
                    if is_over() or not self._step():
                        return
                    for answer in answers:
                        answer.check()
        except CapacityError as error:
            logger.info("no room to warm up %s: %s", stage, error)
        finally:
            for answer in answers:
                self._engine.abort(answer.request_id)

    def _step(self) -> bool:
        """False where a request waits for room, which the others of its batch have."""
        num_waiting = 0 if self._engine.prefills else self._engine.scheduler.num_waiting
        if not self._engine.step():
            time.sleep(PAUSE_SECONDS)
        return not num_waiting or self._engine.scheduler.num_waiting < num_waiting

    def _request(self, stage: Stage, request_id: str) -> GenerationRequest:
        info = self._engine.info
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=tuple(random.Random(0).choices(range(info.vocab_size), k=stage.num_prompt)),
            # What greedy sampling needs is part of it.
            sampling=SamplingParams(stage.max_tokens, temperature=0.7, top_p=0.9, seed=0, ignore_eos=True),
            policy=stage.policy,
            budget=info.default_budget,
            shares_prefix=False,
        )
