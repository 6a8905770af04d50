"""Progress of a request: the phases of its choices, and how far its prompts are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gateway.exchange import Prefilling
from gateway.metrics import Metrics


class Phases:
    """One choice in the worker, observed as each phase and each gap ends; what it does not end, because it fails or is
    cancelled, is not observed. Measured by one clock, the gateway's, from one event of the worker to another.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds."""
        self.first_token_at: float | None = None
        self._metrics = metrics
        self._clock = clock
        self._queued_at = 0.0
        self._begun_at: float | None = None
        self._last_token_at = 0.0
        self._num_gaps = 0

    def enter_queue(self) -> None:
        """The worker is asked; again where it had no room."""
        self._queued_at = self._clock()

    def begin_prefill(self) -> None:
        """The worker is at the prompt; once is enough."""
        if self._begun_at is None:
            self._begun_at = self._clock()
            self._metrics.queue.observe(self._begun_at - self._queued_at)

    def take_token(self) -> None:
        """A token came."""
        now = self._clock()
        if self.first_token_at is None:
            self.first_token_at = now
            begun_at = self._queued_at if self._begun_at is None else self._begun_at
            self._metrics.prefill.observe(now - begun_at)
        else:
            self._metrics.itl.observe(now - self._last_token_at)
            self._num_gaps += 1
        self._last_token_at = now

    def end(self) -> None:
        """The answer is complete."""
        if self.first_token_at is None:
            return
        self._metrics.decode.observe(self._clock() - self.first_token_at)
        if self._num_gaps:
            self._metrics.tpot.observe((self._last_token_at - self.first_token_at) / self._num_gaps)


INTERVAL_S = 0.1


class PrefillProgress:
    """Join the progress of all choices to one account of the request that never falls: of several choices of a prompt
    the furthest counts, and a finished prompt stays finished, should it be computed again. The first account and the
    last are always reported, others once in `INTERVAL_S` at most.
    """

    def __init__(
        self,
        num_prompt_tokens: Sequence[int],
        num_per_prompt: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_per_prompt: choices of a prompt; they lie prompt by prompt. clock: in seconds."""
        self._num_prompt_tokens = num_prompt_tokens
        self._num_per_prompt = num_per_prompt
        self._clock = clock
        # Computed and cached tokens of each prompt.
        self._furthest = [(0, 0)] * len(num_prompt_tokens)
        self._told: tuple[int, int] | None = None
        self._told_at = 0.0

    def take(self, index: int, computed_tokens: int, cached_tokens: int) -> Prefilling | None:
        """Return the account to report now that choice `index` has come this far; None: nothing to report."""
        prompt = index // self._num_per_prompt
        if sum(self._furthest[prompt]) >= self._num_prompt_tokens[prompt]:
            return None
        self._furthest[prompt] = max(self._furthest[prompt], (computed_tokens, cached_tokens), key=sum)
        computed = sum(computed for computed, _ in self._furthest)
        cached = sum(cached for _, cached in self._furthest)
        now, num_tokens = self._clock(), sum(self._num_prompt_tokens)
        is_due = self._told is None or computed + cached == num_tokens
        if self._told == (computed, cached) or not (is_due or now - self._told_at >= INTERVAL_S):
            return None
        self._told, self._told_at = (computed, cached), now
        return Prefilling(num_tokens, computed, cached)
