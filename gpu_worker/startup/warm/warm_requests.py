"""Requests of a warm-up: what they need is compiled, planned and loaded by the time they end."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gpu_worker.errors import CapacityError
from gpu_worker.records import (
    CompleteEvent,
    ErrorEvent,
    Event,
    GenerationRequest,
    ProgressEvent,
    PromptEvent,
    SamplingParams,
    TokenEvent,
)
from gpu_worker.startup.assemble import Assembled

logger = logging.getLogger(__name__)

# A batch of a new shape decodes as it is, then is captured, then replayed.
NUM_STEPS = 3
PAUSE_SECONDS = 0.001
MAX_PROMPT = 1 << 14
# No key's digest.
CALLER, SESSION = b"warm-up", "warm-up"


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one policy and prompt length, which decode together.

    sizes: of the batch, one after the other, as more join.
    num_steps: of each size.
    max_tokens: of each answer.
    gives_up: once they decode, slots are taken from them, as where others need memory; then they decode as many steps
    again.
    """

    policy: str
    num_prompt: int
    max_tokens: int = 1 + NUM_STEPS
    sizes: tuple[int, ...] = (1,)
    num_steps: int = NUM_STEPS
    gives_up: bool = False

    def run(self, worker: Assembled, is_over: Callable[[], bool]) -> None:
        """Leaves nothing behind but counts."""
        answers: list[_Answer] = []
        try:
            for size in self.sizes:
                for number in range(len(answers), size):
                    answers.append(_Answer(f"warm-up-{number}"))
                    worker.engine.submit(self._request(worker, answers[-1].request_id), answers[-1].take)
                if not _decode(worker, answers, self.num_steps, is_over):
                    return
            if self.gives_up and worker.runner.caches.make_room(worker.runner.pool.num_free_blocks + 1):
                _decode(worker, answers, 2 * self.num_steps, is_over)
        except CapacityError as error:
            logger.info("no room to warm up %s: %s", self, error)
        finally:
            for answer in answers:
                worker.engine.abort(answer.request_id)

    def _request(self, worker: Assembled, request_id: str) -> GenerationRequest:
        info = worker.engine.info
        prompt = random.Random(0).choices(range(info.vocab_size), k=self.num_prompt)
        return warm_request(worker, request_id, self.policy, tuple(prompt), self.max_tokens)


@dataclass(frozen=True, slots=True)
class SecondTurn:
    """A prompt of a session, and one that goes on from it: what the store knows of the first is read back, compared
    with its checksums and computed upon. num_new: tokens behind a slab's, of the first prompt, and of the next more."""

    policy: str
    num_new: int

    def run(self, worker: Assembled, is_over: Callable[[], bool]) -> None:
        """Leaves nothing behind but counts, also in the store. Raises StoreUnavailable."""
        sessions = worker.runner.offloader.sessions
        length = sessions.slab_tokens + 2 * self.num_new
        if length + 1 + NUM_STEPS > min(worker.engine.info.max_model_len, MAX_PROMPT):
            return
        prompt = random.Random(0).choices(range(worker.engine.info.vocab_size), k=length)
        answers: list[_Answer] = []
        try:
            for turn in (prompt[: -self.num_new], prompt):
                answers.append(_Answer(f"warm-up-{len(answers)}"))
                asked = warm_request(worker, answers[-1].request_id, self.policy, tuple(turn), 1 + NUM_STEPS)
                shared = replace(asked, shares_prefix=True, prefix_salt=CALLER, session_id=SESSION)
                worker.engine.submit(shared, answers[-1].take)
                if not _decode(worker, answers, NUM_STEPS, is_over):
                    return
        except CapacityError as error:
            logger.info("no room to warm up %s: %s", self, error)
        finally:
            for answer in answers:
                worker.engine.abort(answer.request_id)
            sessions.drop(CALLER, SESSION)
            worker.runner.offloader.prefixes.clear()


def warm_request(
    worker: Assembled, request_id: str, policy: str, prompt: tuple[int, ...], max_tokens: int
) -> GenerationRequest:
    """A request that shares its prompt with no other. What sampling needs is part of it."""
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        # What greedy sampling needs is part of this.
        sampling=SamplingParams(max_tokens, temperature=0.7, top_p=0.9, seed=0, ignore_eos=True),
        constraint=_Anything(),
        policy=policy,
        budget=worker.engine.info.default_budget,
        shares_prefix=False,
    )


class _Anything:
    """A constraint that rules nothing out."""

    is_ready, is_complete = True, False

    def take(self, token_id: int) -> None:
        """As well as any other."""

    def allowed(self, vocab_size: int, end_token_ids: Collection[int]) -> npt.NDArray[np.int32]:
        return np.full(-(-vocab_size // 32), -1, np.int32)


class _Answer:
    """The answer to one request."""

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
            case PromptEvent() | ProgressEvent() | CompleteEvent():
                pass

    def check(self) -> None:
        """Raises what ended the request."""
        if self._error is not None:
            raise self._error


def _decode(worker: Assembled, answers: list[_Answer], num_steps: int, is_over: Callable[[], bool]) -> bool:
    """Until each answer has a token more than so many; False where it is over before."""
    while min(answer.num_tokens for answer in answers) <= num_steps:
        if is_over() or not _step(worker):
            return False
        for answer in answers:
            answer.check()
    return True


def _step(worker: Assembled) -> bool:
    """Run one step of the engine. Return False where a request waits for memory that the others of its batch have."""
    num_waiting = 0 if worker.runner.prefills else worker.engine.scheduler.num_waiting
    if not worker.engine.step():
        time.sleep(PAUSE_SECONDS)
    return not num_waiting or worker.engine.scheduler.num_waiting < num_waiting
