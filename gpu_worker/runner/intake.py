"""Turns requests, which the service has checked, into sequences with a policy each."""

from __future__ import annotations

from collections import deque

from gpu_worker.errors import RequestError
from gpu_worker.policies.base import Policy, without_index
from gpu_worker.policies.hyper_parameters import with_options
from gpu_worker.policies.registry import AUTO, LONG
from gpu_worker.records import GenerationRequest
from gpu_worker.sampling import SamplerState
from gpu_worker.state.sequence import Sequence, ring_size


class Intake:
    """Makes sequences. Holds no state of running requests."""

    def __init__(
        self,
        policies: dict[str, Policy],
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        default_seed: int | None = None,
        has_indexes: bool = True,
        max_model_len: int | None = None,
    ) -> None:
        """has_indexes: indexes are on the device; else the store selects, for policies with indexes that it trains.
        max_model_len: an answer that may fill so much may also end where memory does; None: none may.
        """
        self._policies = policies
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._default_seed = default_seed
        self._has_indexes = has_indexes
        self._max_model_len = max_model_len

    def sequence(self, request: GenerationRequest) -> Sequence:
        """Return a waiting sequence; one with the policy `auto` has that for long contexts until `choose` is called.

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
            policy=policy,
            plan=plan,
            sampler=sampler,
            capacity=num_prompt + max_tokens,
            num_prefill=num_prefill,
            is_open_ended=num_prompt + max_tokens == self._max_model_len,
            forced=deque(request.prompt_token_ids[num_prefill:]),
            window_begin=policy.window_begin(plan, num_prefill),
            ring_size=ring_size(policy, plan),
        )

    def choose(self, sequence: Sequence, name: str) -> None:
        """Give a waiting sequence another policy."""
        policy = self._policies[name]
        if policy is sequence.policy:
            return
        num_prefill, budget = sequence.num_prefill, sequence.request.budget
        sequence.policy = policy
        sequence.plan = policy.plan(num_prefill, budget.resolve(num_prefill))
        sequence.window_begin = policy.window_begin(sequence.plan, num_prefill)
        sequence.ring_size = ring_size(policy, sequence.plan)


def _asked(policy: Policy, request: GenerationRequest) -> Policy:
    """The policy that splits the request's budget by its fields; everything else is the engine's own."""
    if not request.policy_options:
        return policy
    if request.policy == AUTO:
        raise RequestError("The policy auto has no options: name another one.", "carrel.options")
    try:
        return with_options(policy, dict(request.policy_options), of_request=True)
    except ValueError as error:
        raise RequestError(f"{error}.", "carrel.options") from error
