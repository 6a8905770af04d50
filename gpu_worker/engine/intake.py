"""From a request to a sequence: every check that needs the model's limits, and the plan of its budget."""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from gpu_worker.engine.records import EventSink, GenerationRequest
from gpu_worker.engine.sequence import Sequence
from gpu_worker.errors import PromptTooLong, RequestError
from gpu_worker.policies.base import Policy
from gpu_worker.sampling import SamplerState


class Intake:
    """Checks requests and turns them into sequences. Holds no state of running requests."""

    def __init__(
        self,
        policies: dict[str, Policy],
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        default_seed: int | None = None,
    ) -> None:
        self._policies = policies
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._default_seed = default_seed

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
        if request.policy not in self._policies:
            names = ", ".join(sorted(self._policies))
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
        """A waiting sequence. Raises what `validate` raises."""
        self.validate(request)
        num_prompt = len(request.prompt_token_ids)
        num_prefill = request.num_prefill_tokens or num_prompt
        policy = self._policies[request.policy]
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
            ring_size=policy.max_window(plan) + 1 if plan.selects else 0,
        )
