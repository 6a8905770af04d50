"""Turns a checked request into a sequence, with the plan of its budget."""

from __future__ import annotations

from collections import deque

from gpu_worker.engine.admission.auto_policy import FEW_TOKENS, SHORT
from gpu_worker.errors import RequestError
from gpu_worker.policies.base import Policy, without_index
from gpu_worker.policies.hyper_parameters import with_options
from gpu_worker.policies.registry import AUTO, LONG
from gpu_worker.records import EventSink, GenerationRequest
from gpu_worker.sampling import SamplerState
from gpu_worker.state.sequence import Sequence, ring_size


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
