"""Work of the engine's own before the first user's: what that needs is compiled, planned and captured by then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from gpu_worker.engine.pace import NUM_SAMPLES
from gpu_worker.errors import CapacityError, WorkerError
from gpu_worker.policies.registry import AUTO, LONG
from gpu_worker.records import EngineInfo
from gpu_worker.runner.prompts.captured import buckets_within
from gpu_worker.startup.assemble import Assembled
from gpu_worker.startup.warm.warm_requests import MAX_PROMPT, NUM_STEPS, PAUSE_SECONDS, Requests, SecondTurn
from gpu_worker.startup.warm.warm_steps import policy_steps, step_stages
from gpu_worker.state.batch import Buckets

logger = logging.getLogger(__name__)

LIMIT_SECONDS = 120.0
# More for each policy of `--allowed-policies`, at most.
POLICY_SECONDS = 60.0
# Prompts of a few words, of a chat, and of a length that leaves no rest where attention is computed in units.
WORDS, CHAT, UNITS = 16, 300, 1024
# So far below the size of its buffers, a power of two, a prompt's last chunk has whole units and a rest.
REST = 300
# Sizes of a batch of requests.
NUM_SIZES = 6
# Of an answer at most, while others join its batch.
MAX_TOKENS = 512
DENSE = "full"


class Stage(Protocol):
    """A part of the warm-up."""

    def run(self, worker: Assembled, is_over: Callable[[], bool]) -> None:
        """Leaves nothing behind but counts. is_over: asked often; when it is true this returns."""


@dataclass(frozen=True, slots=True)
class Plans:
    """Attention of prompts of every length that is planned by itself, of a few rows of zeros each."""

    def run(self, worker: Assembled, is_over: Callable[[], bool]) -> None:
        try:
            for _ in worker.runner.prefills.plan_attention():
                if is_over():
                    return
        except CapacityError as error:
            logger.info("no room to plan attention: %s", error)


@dataclass(frozen=True, slots=True)
class OtherPolicy:
    """Prompts and steps of a policy that is not the server's, for `POLICY_SECONDS` at most. What fails is logged, and
    costs this policy alone."""

    policy: str
    prefill_chunk: int

    def run(self, worker: Assembled, is_over: Callable[[], bool]) -> None:
        until = time.monotonic() + POLICY_SECONDS
        what = f"the warm-up of {self.policy} failed, its first requests may take longer"

        def is_late() -> bool:
            return is_over() or time.monotonic() > until

        try:
            caches = worker.runner.caches
            info = replace(worker.engine.info, max_num_seqs=caches.num_long)
            found = policy_requests(self.policy, info, self.prefill_chunk, caches.buckets)
            turn = SecondTurn(self.policy, CHAT)
            for stage in [*found, turn, *policy_steps(worker, self.policy)]:
                if not is_late():
                    stage.run(worker, is_late)
        except WorkerError as error:
            logger.warning("%s: %s", what, error)
        except Exception:
            logger.warning(what, exc_info=True)


def stages(worker: Assembled, prefill_chunk: int, others: Sequence[str] = ()) -> list[Stage]:
    """Return the stages of a warm-up.

    On a GPU: requests of the default policy and of `full`, and their second turns; plans of attention for prompts of
    any length; steps of batches of any size, of `others` too. On a CPU, which compiles nothing: one short request.
    """
    info = worker.engine.info
    caches = worker.runner.caches
    found = requests(info, prefill_chunk, caches.buckets, caches.num_long)
    if info.device == "cpu":
        return [*found]
    first, rest = found[:1], found[1:]
    # Before the steps, which hold what these allocate.
    long, short = (
        [one for one in rest if (one.max_tokens > MAX_TOKENS) is is_long] for is_long in (True, False)
    )
    turns = [SecondTurn(policy, CHAT) for policy in dict.fromkeys((info.default_policy, DENSE))]
    more = [OtherPolicy(policy, prefill_chunk) for policy in others]
    return [*first, *long, *turns, *more, Plans(), *step_stages(worker), *short]


def requests(info: EngineInfo, prefill_chunk: int, buckets: Buckets, num_long: int) -> list[Requests]:
    """The likeliest first; the last one is alone. num_long: of the greatest length that are scored at once."""
    policy, longest = info.default_policy, info.max_model_len
    found = [Requests(policy, WORDS)]
    if info.device != "cpu":
        # As it is, then captured; the largest first, so that its memory serves the others.
        for size in reversed(buckets_within(min(prefill_chunk, longest))):
            found += [Requests(DENSE, min(size, prefill_chunk), max_tokens=1, num_steps=0)] * 2
        selecting = replace(info, max_num_seqs=num_long)
        found += policy_requests(policy, selecting, prefill_chunk, buckets)
        if policy != DENSE:
            sizes = _batch_sizes(info.max_num_seqs, buckets)
            found.append(Requests(DENSE, CHAT, min(MAX_TOKENS, longest - CHAT), sizes))
        # The engine's measure of a step is that of a captured one again.
        found += [Requests(policy, CHAT, 1 + NUM_SAMPLES, num_steps=NUM_SAMPLES)]
    return _that_fit(found, longest)


def policy_requests(policy: str, info: EngineInfo, prefill_chunk: int, buckets: Buckets) -> list[Requests]:
    """On a GPU: chats that join a batch, one that gives slots up, and prompts of every size of buffer."""
    longest = info.max_model_len
    lengths = _prompt_lengths(min(longest - 1 - NUM_STEPS, MAX_PROMPT), prefill_chunk)
    selecting = [length for length in (CHAT, *lengths) if 2 * info.default_budget.resolve(length) <= length]
    chat = next((length for length in selecting if length <= UNITS), CHAT)
    sizes = _batch_sizes(info.max_num_seqs, buckets)
    found = [
        Requests(policy, chat, min(MAX_TOKENS, longest - chat), sizes),
        # With space for an answer of any length: where memory is scarce it has fewer slots than tokens.
        *(Requests(policy, length, longest - length, gives_up=True) for length in selecting[:1]),
        *(Requests(policy, length) for length in lengths),
    ]
    return _that_fit(found, longest)


def _that_fit(found: Sequence[Requests], longest: int) -> list[Requests]:
    return [
        each
        for each in found
        if each.max_tokens > each.num_steps and each.num_prompt + each.max_tokens <= longest
    ]


def _batch_sizes(max_num_seqs: int, buckets: Buckets) -> tuple[int, ...]:
    """Return the smallest of the sizes that batches are padded to."""
    sizes = {min(buckets.lanes(size), max_num_seqs) for size in range(1, max_num_seqs + 1)}
    return tuple(sorted(sizes)[:NUM_SIZES])


def _prompt_lengths(most: int, prefill_chunk: int) -> list[int]:
    """Above a chat's; one in each size of a prompt's buffers."""
    lengths, buffer = {UNITS, prefill_chunk + REST}, 2 * UNITS
    while buffer // 2 < most:
        lengths.add(min(buffer - REST, most))
        buffer *= 2
    return sorted(length for length in lengths if length <= most)


def _others(default: str, policies: Sequence[str]) -> list[str]:
    """Return the policies that the stages of the server's policy and of `full` leave out."""
    meant = [LONG if policy == AUTO else policy for policy in policies]
    done = DENSE, LONG if default == AUTO else default
    return [policy for policy in dict.fromkeys(meant) if policy not in done]


class WarmUp:
    """Drives an engine through `stages`. Afterwards none of its requests is left, nor what they stored and counted."""

    def __init__(
        self,
        worker: Assembled,
        prefill_chunk: int,
        report: Callable[[int, int], None],
        limit_seconds: float = LIMIT_SECONDS,
        policies: Sequence[str] = (),
    ) -> None:
        """report: gets how many stages are done, and of how many. limit_seconds: what is not done by then is left
        out; `POLICY_SECONDS` more for each of the policies that are warmed up too."""
        self._worker = worker
        self._prefill_chunk = prefill_chunk
        self._report = report
        self._policies = _others(worker.engine.info.default_policy, policies)
        self._limit_seconds = limit_seconds + POLICY_SECONDS * len(self._policies)

    def run(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """On the thread that drives the engine, before its first request. A failure ends it, and is logged.

        is_stopped: asked before every step.
        """
        begun = time.monotonic()
        num_stages = 1

        def is_over() -> bool:
            return is_stopped() or time.monotonic() - begun > self._limit_seconds

        try:
            found = stages(self._worker, self._prefill_chunk, self._policies)
            num_stages = len(found)
            for number, stage in enumerate(found):
                self._report(number, num_stages)
                if not is_over():
                    with torch.inference_mode():
                        stage.run(self._worker, is_over)
            while not (is_over() or self._worker.runner.offloader.arena.is_settled):
                time.sleep(PAUSE_SECONDS)
        except WorkerError as error:
            logger.warning("the warm-up failed, first requests may take longer: %s", error)
        except Exception:
            logger.warning("the warm-up failed, first requests may take longer", exc_info=True)
        finally:
            self._worker.engine.reset_counts()
        self._report(num_stages, num_stages)
        logger.info("the warm-up took %.1f s", time.monotonic() - begun)
