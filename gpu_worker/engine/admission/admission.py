"""The way in: requests as sequences, with a policy each; room for them, several short ones at once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection

import torch

from gpu_worker.caches import CacheSet
from gpu_worker.engine.admission.preemption import Patience, Preemption, StoreCare
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import (
    ArenaFull,
    CapacityError,
    NeverFits,
    PrefixLoading,
    RequestError,
    StoreSilent,
    StoreUnavailable,
    WorkerError,
)
from gpu_worker.policies.base import CacheShape, Policy, without_index
from gpu_worker.policies.hyper_parameters import with_options
from gpu_worker.policies.registry import AUTO, LONG
from gpu_worker.records import Budget, EventSink, GenerationRequest
from gpu_worker.sampling import SamplerState
from gpu_worker.state.sequence import Sequence, Status, ring_size
from gpu_worker.store.offload import Offloader
from gpu_worker.store.prefixes import PrefixChain

# The policy of short contexts where a request has `auto`; of long ones it is the registry's `LONG`.
SHORT = "full"

# Tokens that are always few. On a CPU no more are: there attending is what costs.
FEW_TOKENS = 4096
# What scoring, top-k and finding the slots cost a layer, however few the tokens: launches, and passes over little data.
SELECTION_SECONDS = 60e-6
PROBE_BYTES = 128 << 20
NUM_PROBES = 10
# Up to so many tokens a prompt adds less time to another's pass through the layers than one of its own takes before its
# first token: launches, and reading the weights. A longer one would only let who is before it wait. Measured with
# carrel-nano on a CPU; a GPU computes some hundred tokens while it reads the weights.
JOINING_TOKENS = {"cpu": 32, "cuda": 512}


def max_full_tokens(shape: CacheShape, budget: Budget, code_bytes: int, bytes_per_second: float) -> int:
    """Longest context, prompt and answer, for which a decode step is no slower when it attends all of it.

    A step reads, in each layer, n rows of every KV head; with a budget of b tokens b of them and n codes, and it spends
    SELECTION_SECONDS, which all sequences of the batch share: a full batch is what counts. code_bytes: of a
    token's code in one head.
    """
    fixed_bytes = bytes_per_second * SELECTION_SECONDS / shape.max_num_seqs
    row_bytes = shape.row_format.row_bytes
    per_token = row_bytes - code_bytes
    if budget.tokens is not None:
        fixed_bytes += shape.num_kv_heads * budget.tokens * row_bytes
    else:
        per_token -= int((budget.share or 1.0) * row_bytes)
    if per_token <= 0:
        return shape.max_model_len
    length = int(fixed_bytes / (shape.num_kv_heads * per_token))
    return min(shape.max_model_len, max(FEW_TOKENS, length))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes that a CUDA device reads and writes a second when it copies its memory."""
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(NUM_PROBES):
        target.copy_(source)
    end.record()
    end.synchronize()
    del source, target
    torch.cuda.empty_cache()
    return 2 * NUM_PROBES * PROBE_BYTES / (1e-3 * begin.elapsed_time(end))


class Intake:
    """Turns requests, which the service has checked, into sequences. Holds no state of running requests."""

    def __init__(
        self,
        policies: dict[str, Policy],
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        default_seed: int | None = None,
        max_full_tokens: int = FEW_TOKENS,
        has_indexes: bool = True,
        max_model_len: int | None = None,
    ) -> None:
        """max_full_tokens: longest prompt that the policy `auto` attends whole. has_indexes: on the device; else the
        store selects, for policies whose indexes it trains. max_model_len: an answer that may fill so much may also
        end where room does; None: none may."""
        self._policies = policies
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._default_seed = default_seed
        self._max_full_tokens = max_full_tokens
        self._has_indexes = has_indexes
        self._max_model_len = max_model_len

    def sequence(self, request: GenerationRequest, sink: EventSink) -> Sequence:
        """A waiting sequence; one with the policy `auto` has that for long contexts until `choose` is called.

        Raises RequestError for a policy that needs an index on the device where there is none, and for options that the
        policy does not take from a request.
        """
        num_prompt = len(request.prompt_token_ids)
        num_prefill = request.num_prefill_tokens or num_prompt
        policy = self._policies[LONG if request.policy == AUTO else request.policy]
        if policy.needs_index_here and not self._has_indexes:
            raise RequestError(without_index(policy), "carrel.policy")
        max_tokens = request.sampling.max_tokens
        plan = _asked(policy, request).plan(num_prefill, request.budget.resolve(num_prefill))
        sampler = SamplerState(
            request.sampling,
            request.prompt_token_ids,
            self._vocab_size,
            self._eos_token_ids,
            request.request_id,
            self._default_seed,
            request.constraint,
        )
        return Sequence(
            request=request,
            sink=sink,
            policy=policy,
            plan=plan,
            sampler=sampler,
            max_tokens=max_tokens,
            capacity=num_prompt + max_tokens,
            num_prefill=num_prefill,
            is_open_ended=num_prompt + max_tokens == self._max_model_len,
            forced=deque(request.prompt_token_ids[num_prefill:]),
            window_begin=policy.window_begin(plan, num_prefill),
            ring_size=ring_size(policy, plan),
        )

    def choose(self, sequence: Sequence, num_free_slots: int) -> None:
        """Choose the policy of a waiting sequence that has `auto`; call it right before admission.

        It is `full` if the context is short and fits in the free slots of each layer and KV head. A short prompt whose
        answer may be long may have half of these: a share of so few tokens would be next to nothing. Of an answer
        that names no limit only its next tokens count. Who gave way keeps what was chosen.
        """
        if sequence.request.policy != AUTO or sequence.has_given_way:
            return
        num_tokens = sequence.soon_tokens if sequence.is_open_ended else sequence.capacity
        if num_tokens > self._max_full_tokens:
            num_free_slots //= 2
        is_short = sequence.num_prefill <= self._max_full_tokens and num_tokens <= num_free_slots
        policy = self._policies[SHORT if is_short else LONG]
        if policy is sequence.policy:
            return
        num_prefill, budget = sequence.num_prefill, sequence.request.budget
        sequence.policy = policy
        sequence.plan = policy.plan(num_prefill, budget.resolve(num_prefill))
        sequence.window_begin = policy.window_begin(sequence.plan, num_prefill)
        sequence.ring_size = ring_size(policy, sequence.plan)


def _asked(policy: Policy, request: GenerationRequest) -> Policy:
    """The policy by whose fields the request's budget is split; everything else is the engine's own."""
    if not request.policy_options:
        return policy
    if request.policy == AUTO:
        raise RequestError("The policy auto has no options: name another one.", "carrel.options")
    try:
        return with_options(policy, dict(request.policy_options), of_request=True)
    except ValueError as error:
        raise RequestError(f"{error}.", "carrel.options") from error


class Admission:
    """Admits sequences, each with all it needs or not at all: a seat, its policy, slots in every layer, and a place in
    the store, which it needs, or for a copy of its prompt. Those that never can come in end with an error."""

    def __init__(
        self,
        scheduler: Scheduler,
        intake: Intake,
        caches: CacheSet,
        offloader: Offloader,
        prefixes: PrefixChain | None,
        preemption: Preemption,
        patience: Patience,
        store_care: StoreCare,
        max_joining: int,
        fail: Callable[[Sequence, WorkerError], None],
        end_full: Callable[[Sequence, CapacityError], None],
    ) -> None:
        """prefixes: names the prefixes that requests may share; None: nothing is shared. max_joining: tokens of a
        prompt that joins others. fail, end_full: end one with an error; the latter one that alone fills the arena."""
        self._scheduler = scheduler
        self._intake = intake
        self._caches = caches
        self._offloader = offloader
        self._prefixes = prefixes
        self._preemption = preemption
        self._patience = patience
        self._store_care = store_care
        self._fail = fail
        self._end_full = end_full
        # What the sequence that was refused last missed in the arena.
        self._missing_bytes = 0.0
        self._max_joining = max_joining

    def expect(self, sequence: Sequence) -> None:
        """Guess how much of a waiting sequence's prompt is known. Asks nobody."""
        if self._prefixes is not None:
            hashes, num_reusable = self._names(sequence)
            num_known = self._offloader.known.count(hashes[:num_reusable])
            sequence.num_expected = num_known * self._prefixes.tokens_per_slab

    def admit(self, sequence: Sequence) -> list[Sequence] | None:
        """Admit a waiting prompt, and short ones with it. Returns those that were admitted, maybe none; None where it
        must wait, and others not before it."""
        if not self._admit(sequence):
            return [] if self._patience.looks_later(sequence) else None
        together, held = [sequence], self._patience.held
        while (other := self._next_beside(together, held)) is not None and self._admit(other):
            together.append(other)
        # One that was admitted may have ended since, or given way to a later one.
        return [each for each in dict.fromkeys(together) if each.status is Status.PREFILL]

    def _admit(self, sequence: Sequence) -> bool:
        """Admit one, or end it with an error; False where it must wait."""
        try:
            is_admitted = self._make_room(sequence)
        except PrefixLoading:
            self._patience.look_later(sequence)
            return False
        except StoreSilent:
            self._patience.wait(sequence)
            return False
        except NeverFits as error:
            self._end_full(sequence, error)
            return True
        except (CapacityError, RequestError, StoreUnavailable) as error:
            self._fail(sequence, error)
            return True
        finally:
            self._store_care.end_lost()
        self._patience.end(sequence)
        return is_admitted

    def _make_room(self, sequence: Sequence) -> bool:
        """Admit one, others giving way perhaps; False if it must wait until others end. If it `offloads` then it waits
        for room in the arena.

        Raises NeverFits, RequestError or StoreUnavailable where it never can, StoreSilent where it may be tried again
        once the store answers, and PrefixLoading where soon. This may attach to the store again: see `Offloader.holds`.
        """
        while not self._try(sequence):
            if not self._preemption.make_way(sequence, self._missing_bytes):
                return False
        return True

    def _try(self, sequence: Sequence) -> bool:
        self._missing_bytes = 0.0
        if sequence.offloads and self._must_wait(sequence):
            return False
        sequence.offloads = False
        if not self._scheduler.num_free_seats:
            return False
        self._scheduler.seat(sequence)
        self._intake.choose(sequence, self._caches.num_free_slots)
        if not self._caches.admit(sequence):
            self._scheduler.unseat(sequence)
            return False
        try:
            is_open = self._finds_room(sequence)
        except (PrefixLoading, StoreSilent):
            self._caches.release(sequence)
            self._scheduler.unseat(sequence)
            raise
        except WorkerError:
            self._caches.release(sequence)
            raise
        if not is_open:
            self._caches.release(sequence)
            self._scheduler.unseat(sequence)
            return False
        self._scheduler.admit(sequence)
        return True

    def _finds_room(self, sequence: Sequence) -> bool:
        """Start the sequence in the store; False where it must wait for room there."""
        if sequence.offloads and (missing := self._missing_alone(sequence)):
            if not self._caches.does_without_store(sequence):
                raise NeverFits(
                    f"{sequence.known_tokens} tokens and the index over them need {missing} bytes more than the KV "
                    "store has; send a shorter prompt, or start with a larger --arena-bytes"
                )
            sequence.offloads = False
        if sequence.offloads and self._must_wait(sequence):
            return False
        try:
            sequence.num_cached = self._open(sequence)
        except ArenaFull as error:
            self._missing_bytes = error.missing_bytes
            self._preemption.refused()
            return False
        if not sequence.has_given_way:
            sequence.num_reused = sequence.num_cached
        return True

    def _must_wait(self, sequence: Sequence) -> bool:
        """Whether it must not look for room in the arena now. Then nobody gives way for what else it misses. Raises
        StoreSilent."""
        self._offloader.check_answers()
        if must_wait := self._preemption.must_wait(sequence):
            self._missing_bytes = math.inf
        return must_wait

    def _missing_alone(self, sequence: Sequence) -> int:
        """Bytes that it would miss in an empty arena, for its prompt and the next token."""
        jobs = [one.cache.prompt_job(sequence, one.index) for one in self._caches.of(sequence)]
        return self._offloader.missing_alone(
            sequence.known_tokens + 1, [job for job in jobs if job is not None]
        )

    def _next_beside(self, together: list[Sequence], held: Collection[Sequence]) -> Sequence | None:
        """The waiting sequence, none of `held`, whose prompt is to be computed with these, which were admitted just
        now, in one pass; None: no more."""
        found = self._scheduler.next_beside(together, held)
        if found is None or found.num_prefill > self._max_joining:
            return None
        if any(each.prompt_attention() is not None for each in (*together, found)):
            return None
        hashes, num_reusable = self._names(found)
        first = hashes[: min(1, num_reusable)]
        # Once one that begins alike is computed, most of this one is.
        return None if first and any(self._names(other)[0][:1] == first for other in together) else found

    def _open(self, sequence: Sequence) -> int:
        """Start the sequence, or a copy of its prompt, in the store; returns how many of its tokens are there. There is
        room for all that it had when it gave way."""
        hashes, num_reusable = self._names(sequence)
        if sequence.offloads:
            room = max(sequence.num_prefill, sequence.known_tokens if sequence.has_given_way else 0) + 1
            num_known = self._offloader.open(sequence, room, hashes, num_reusable)
        else:
            num_known = self._offloader.copies.open(sequence, hashes, num_reusable)
        if self._prefixes is not None:
            self._caches.find_resident(sequence, hashes, num_known // self._prefixes.tokens_per_slab)
        return num_known

    def _names(self, sequence: Sequence) -> tuple[tuple[bytes, ...], int]:
        """Of the slabs that its prompt fills, and how many of them it may have from others."""
        if self._prefixes is None or not sequence.shares_prompt:
            return (), 0
        num_reusable = self._prefixes.num_reusable(sequence) if sequence.trusts_prefixes else 0
        return self._prefixes.hashes(sequence), num_reusable
