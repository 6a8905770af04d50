"""From a request to a sequence: every check that needs the model's limits, and the plan of its budget."""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from gpu_worker.engine.auto_policy import AUTO, FEW_TOKENS, LONG, SHORT
from gpu_worker.errors import PromptTooLong, RequestError
from gpu_worker.policies.base import Family, Plan, Policy
from gpu_worker.records import Budget, EventSink, GenerationRequest
from gpu_worker.sampling import SamplerState
from gpu_worker.state.sequence import Sequence


class Intake:
    """Checks requests and turns them into sequences. Holds no state of running requests."""

    def __init__(
        self,
        policies: dict[str, Policy],
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        default_seed: int | None = None,
        max_full_tokens: int = FEW_TOKENS,
    ) -> None:
        """max_full_tokens: longest context that the policy `auto` attends whole."""
        self._policies = policies
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._default_seed = default_seed
        self._max_full_tokens = max_full_tokens

    def validate(self, request: GenerationRequest) -> None:
        """Raises RequestError naming the field, or PromptTooLong. Pure: any thread may call it."""
        num_prompt = len(request.prompt_token_ids)
        if not num_prompt:
            raise RequestError("the prompt holds no token; send at least one", "prompt")
        if not all(0 <= token_id < self._vocab_size for token_id in request.prompt_token_ids):
            raise RequestError(f"a prompt token id lies outside [0, {self._vocab_size})", "prompt")
        if request.sampling.max_tokens < 0:
            raise RequestError(f"max_tokens is {request.sampling.max_tokens}; give 0 or more", "max_tokens")
        if num_prompt + max(1, request.sampling.max_tokens) > self._max_model_len:
            raise PromptTooLong(num_prompt, max(1, request.sampling.max_tokens), self._max_model_len)
        if not 0 <= request.num_prefill_tokens <= num_prompt:
            raise RequestError(
                f"num_prefill_tokens is {request.num_prefill_tokens}; give 0 to {num_prompt}, the prompt's length",
                "num_prefill_tokens",
            )
        if request.policy != AUTO and request.policy not in self._policies:
            names = ", ".join(sorted((AUTO, *self._policies)))
            raise RequestError(f"unknown policy {request.policy!r}; choose one of {names}", "carrel.policy")
        self._check_budget(request)

    def _check_budget(self, request: GenerationRequest) -> None:
        share, tokens = request.budget.share, request.budget.tokens
        if (share is None) == (tokens is None):
            raise RequestError("a budget is either a share or a number of tokens", "carrel.budget")
        if share is not None and not 0 < share <= 1:
            raise RequestError(f"budget share {share} lies outside (0, 1]", "carrel.budget")
        if tokens is not None and tokens < 2:
            raise RequestError(f"a budget of {tokens} tokens is below 2, the least there is", "carrel.budget")

    def refuse_duplicate(self, request: GenerationRequest) -> NoReturn:
        raise RequestError(f"request id {request.request_id!r} is already running; use another", "request_id")

    def sequence(self, request: GenerationRequest, sink: EventSink) -> Sequence:
        """A waiting sequence; whose policy is `auto` has the one for long contexts until `choose` is asked.

        Raises what `validate` raises.
        """
        self.validate(request)
        num_prompt = len(request.prompt_token_ids)
        num_prefill = request.num_prefill_tokens or num_prompt
        policy = self._policies[LONG if request.policy == AUTO else request.policy]
        room = self._max_model_len - num_prompt
        max_tokens = request.sampling.max_tokens or room
        plan = policy.plan(num_prefill, request.budget.resolve(num_prefill))
        sampler = SamplerState(
            request.sampling,
            request.prompt_token_ids,
            self._vocab_size,
            self._eos_token_ids,
            request.request_id,
            self._default_seed,
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
            forced=deque(request.prompt_token_ids[num_prefill:]),
            window_begin=policy.window_begin(plan, num_prefill),
            ring_size=ring_size(policy, plan),
        )

    def choose(self, sequence: Sequence, num_free_slots: int) -> None:
        """Settle the policy of a waiting sequence that has `auto`; ask right before it is admitted.

        It attends everything where its context is short and fits in the free slots of each layer and KV head.
        """
        if sequence.request.policy != AUTO:
            return
        is_short = sequence.capacity <= min(self._max_full_tokens, num_free_slots)
        policy = self._policies[SHORT if is_short else LONG]
        if policy is sequence.policy:
            return
        num_prefill, budget = sequence.num_prefill, sequence.request.budget
        sequence.policy = policy
        sequence.plan = policy.plan(num_prefill, budget.resolve(num_prefill))
        sequence.window_begin = policy.window_begin(sequence.plan, num_prefill)
        sequence.ring_size = ring_size(policy, sequence.plan)


def ring_size(policy: Policy, plan: Plan) -> int:
    """Window tokens and the new one, at most, where a sequence selects."""
    return policy.max_window(plan) + 1 if plan.selects else 0


def usual_fixed(policies: dict[str, Policy], name: str, budget: Budget, length: int) -> int:
    """Sinks, window and new token of a prompt of this length under this policy; 0 where it does not recall."""
    policy = policies.get(name)
    if policy is None or policy.family is not Family.RECALL:
        return 0
    plan = policy.plan(length, budget.resolve(length))
    return plan.num_sink + ring_size(policy, plan) if plan.selects else 0
