"""Decides which waiting requests may start, with which policy, and which of them are computed together."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from gpu_worker.engine.preemption import Preemption
from gpu_worker.engine.request import Request
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import StoreSilent, WorkerError
from gpu_worker.policies.registry import AUTO, LONG, SHORT
from gpu_worker.records.plans import Admit, Runner


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of an attempt to admit a request.

    error: the reason for a refusal that does not depend on other requests.
    missing_bytes: bytes that the request missed in the arena; infinite where no request can free any.
    lost: requests with rows in an earlier store.
    """

    is_admitted: bool
    error: WorkerError | None = None
    missing_bytes: float = 0.0
    lost: tuple[str, ...] = ()


class Admission:
    """Tries requests, each with all it needs or not at all: a seat, its policy, slots in every layer, and a place in
    the store, which it needs, or for a copy of its prompt."""

    def __init__(
        self,
        scheduler: Scheduler,
        preemption: Preemption,
        runner: Runner,
        max_full_tokens: int,
        max_joining: int,
    ) -> None:
        """max_full_tokens: longest context that the policy `auto` attends whole. max_joining: tokens of a prompt that
        joins others."""
        self._scheduler = scheduler
        self._preemption = preemption
        self._runner = runner
        self._max_full_tokens = max_full_tokens
        self._max_joining = max_joining

    def attempt(self, request: Request) -> Verdict:
        """Admit a waiting request if it finds all it needs."""
        must_wait = self._preemption.must_wait(request)
        if request.waits_for_arena and self._runner.silent_seconds:
            return Verdict(False, StoreSilent("the KV store does not answer"))
        if request.waits_for_arena and must_wait:
            return Verdict(False, missing_bytes=math.inf)
        policy = self._policy_of(request)
        if not self._scheduler.num_free_seats:
            request.waits_for_arena = False
            return Verdict(False)
        self._scheduler.seat(request)
        admitted = self._runner.admit(
            Admit(
                request.request_id,
                request.seat,
                policy,
                not must_wait,
                request.trusts_prefixes,
            )
        )
        request.waits_for_arena = admitted.needs_arena and not admitted.is_admitted
        if not admitted.is_admitted:
            self._scheduler.unseat(request)
            if request.waits_for_arena and admitted.error is None:
                if must_wait:
                    return Verdict(False, missing_bytes=math.inf, lost=admitted.lost)
                self._preemption.refused()
            return Verdict(False, admitted.error, admitted.missing_bytes, admitted.lost)
        request.num_cached = admitted.num_cached
        self._scheduler.admit(request)
        return Verdict(True, lost=admitted.lost)

    def _policy_of(self, request: Request) -> str | None:
        """Choose the policy of a request that has `auto`; None: it has its own, or keeps what was chosen before.

        It is `full` if the context is short and fits in the free slots of each layer and KV head. A short prompt that
        may get a long answer may have half of these: a share of so few tokens would be next to nothing. Of an answer
        that names no limit only its next tokens count.
        """
        if request.asked.policy != AUTO or request.was_preempted:
            return None
        entered, num_free_slots = request.entered, self._runner.num_free_slots
        num_tokens = request.soon_tokens if entered.is_open_ended else entered.capacity
        if num_tokens > self._max_full_tokens:
            num_free_slots //= 2
        is_short = request.num_prefill <= self._max_full_tokens and num_tokens <= num_free_slots
        return SHORT if is_short else LONG

    def next_beside(self, together: list[Request], held: Collection[Request]) -> Request | None:
        """Return the waiting request, none of `held`, to be computed in one pass with these, which were admitted just
        now; None: no more."""
        found = self._scheduler.next_beside(together, held)
        if found is None or found.num_prefill > self._max_joining:
            return None
        if not all(each.entered.is_dense for each in (*together, found)):
            return None
        first = found.entered.first_name if found.entered.may_reuse and found.trusts_prefixes else None
        # Once one that begins alike is computed, most of this one is.
        is_known_soon = first is not None and any(each.entered.first_name == first for each in together)
        return None if is_known_soon else found
