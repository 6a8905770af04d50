"""The gateway's one service: chat and completion, whatever the protocol."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from gateway.accounting import total_usage
from gateway.admission import Admission
from gateway.carrel_options import check_policy
from gateway.choice import Choice
from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest, RequestTimeout, UnknownModel, WorkerUnavailable
from gateway.generation_defaults import GenerationDefaults
from gateway.merge import merge
from gateway.metrics import Metrics
from gateway.prompts import PromptEncoder
from gateway.records import (
    ChatRequest,
    ChoiceFinished,
    Completed,
    CompletionRequest,
    Event,
    Generation,
    GenerationOptions,
    Message,
    WorkerInfo,
    WorkerRequest,
)
from gateway.request_ids import internal_id, public_id
from gateway.sampling import check_options, check_token_ids, resolve_sampling
from gateway.tokenizer import Tokenizer
from gateway.worker_client import WorkerClient
from gateway.worker_status import WorkerStatus

MAX_CHOICES = 64
# what OpenAI's completions default to
COMPLETION_MAX_TOKENS = 16
BODY_BYTES_PER_TOKEN = 8
MIN_BODY_BYTES = 2**20
# while the worker's maximum length is not known
UNKNOWN_BODY_BYTES = 64 * 2**20

log = logging.getLogger(__name__)

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class _Plan:
    """A request on its way; `encode` makes the prompts, `default_max_tokens` None fills the context."""

    request_id: str
    endpoint: str
    prompt_param: str
    num_prompts: int
    encode: Callable[[WorkerInfo], Awaitable[tuple[TokenIds, ...]]]
    default_max_tokens: int | None
    options: GenerationOptions
    lead: str
    caller: bytes

    @property
    def num_choices(self) -> int:
        return self.num_prompts * max(self.options.n, 0)


class ChatService:
    """Checks and tokenizes requests, runs them on the worker and turns tokens into text.

    Must be built inside the event loop. Every error that a caller may see is a ServiceError. `more_metrics` gives
    Prometheus text of its own.
    """

    def __init__(
        self,
        config: GatewayConfig,
        worker: WorkerClient,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        more_metrics: Callable[[], bytes] = bytes,
    ) -> None:
        self._config = config
        self._worker = worker
        self._tokenizer = tokenizer
        self._prompts = PromptEncoder(tokenizer)
        self._defaults = defaults
        self._metrics = Metrics(config.model_name)
        self._more_metrics = more_metrics
        self.admission = Admission(config.max_concurrent)
        self.status = WorkerStatus(worker, self.admission)

    @property
    def model_name(self) -> str:
        return self._config.model_name

    def chat(self, request: ChatRequest) -> Generation:
        """Continue a chat. Nothing happens until the events are iterated; errors come with the first of them."""
        options = request.options

        async def encode(info: WorkerInfo) -> tuple[TokenIds, ...]:
            arguments, max_tokens = request.template_arguments, options.max_tokens or 1
            return (await self._prompts.chat(request.messages, arguments, info, max_tokens),)

        return self._generation(
            _Plan(
                public_id(request.request_id),
                "chat",
                "messages",
                1,
                encode,
                None,
                options,
                self._tokenizer.answer_lead,
                request.caller,
            )
        )

    def completion(self, request: CompletionRequest) -> Generation:
        """Continue each prompt, as `chat` does; choice `i * n + j` is the j-th continuation of prompt i."""
        options = request.options

        async def encode(info: WorkerInfo) -> tuple[TokenIds, ...]:
            return tuple([await self._encode(prompt, info, options) for prompt in request.prompts])

        request_id, num_prompts = public_id(request.request_id), len(request.prompts)
        return self._generation(
            _Plan(
                request_id,
                "completion",
                "prompt",
                num_prompts,
                encode,
                COMPLETION_MAX_TOKENS,
                options,
                "",
                request.caller,
            )
        )

    async def tokenize_text(self, text: str, add_special_tokens: bool) -> TokenIds:
        with self.admission.place():
            return await self._prompts.text(text, add_special_tokens, await self.status.info(), 1, "prompt")

    async def tokenize_chat(self, messages: tuple[Message, ...]) -> TokenIds:
        with self.admission.place():
            return await self._prompts.chat(messages, {}, await self.status.info(), 1)

    async def detokenize(self, token_ids: TokenIds) -> str:
        with self.admission.place():
            check_token_ids(token_ids, (await self.status.info()).vocab_size, "tokens")
            return await asyncio.to_thread(self._tokenizer.decode, token_ids)

    async def max_body_bytes(self) -> int:
        """The largest request body that is read."""
        if self._config.max_body_bytes is not None:
            return self._config.max_body_bytes
        try:
            info = await self.status.info()
        except WorkerUnavailable:
            return UNKNOWN_BODY_BYTES
        return max(MIN_BODY_BYTES, info.max_model_len * BODY_BYTES_PER_TOKEN)

    async def render_metrics(self) -> bytes:
        """Prometheus text: the gateway's own metrics, the worker's while it answers, and what else there is."""
        return self._metrics.render(await self.status.stats()) + self._more_metrics()

    def check_model(self, model: str | None) -> None:
        """Raises UnknownModel; no name at all means the one that is served."""
        if model and model not in (self.model_name, self._config.model):
            raise UnknownModel(model, self.model_name)

    def _generation(self, plan: _Plan) -> Generation:
        return Generation(plan.request_id, self.model_name, int(time.time()), self._counted(plan))

    async def _counted(self, plan: _Plan) -> AsyncGenerator[Event, None]:
        """The request's events, with its place held, its metrics kept and one log line at its end."""
        started_at = time.monotonic()
        outcome = "cancelled"
        try:
            with self.admission.place(), self._metrics.running.track_inprogress():
                async with aclosing(self._run(plan, started_at)) as events:
                    async for event in events:
                        match event:
                            case ChoiceFinished(finish_reason=reason):
                                outcome = reason.value
                        yield event
        except WorkerUnavailable:
            outcome = WorkerUnavailable.__name__
            self.status.forget()
            raise
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            took_s = time.monotonic() - started_at
            self._metrics.e2e.observe(took_s)
            self._metrics.count_request(plan.endpoint, outcome)
            log.info("%s %s: %s in %.3f s", plan.endpoint, plan.request_id, outcome, took_s)

    async def _run(self, plan: _Plan, started_at: float) -> AsyncGenerator[Event, None]:
        self.check_model(plan.options.model)
        info = await self.status.info()
        check_options(plan.options, info)
        check_policy(plan.options.carrel, info)
        if not 0 < plan.num_choices <= MAX_CHOICES:
            raise InvalidRequest(
                f"{plan.num_prompts} prompts with n={plan.options.n}: a request may have 1 to {MAX_CHOICES} choices.",
                plan.prompt_param,
            )
        prompts = await plan.encode(info)
        deadline = started_at + self._config.request_timeout_s
        choices = [
            self._choice(plan, info, at * plan.options.n + index, index, prompt, deadline)
            for at, prompt in enumerate(prompts)
            for index in range(plan.options.n)
        ]
        num_prompt_tokens = [len(prompt) for prompt in prompts]
        self._metrics.prompt_tokens.inc(sum(num_prompt_tokens))
        has_token = False
        async with aclosing(merge([choice.events() for choice in choices])) as events:
            async for event in events:
                if not has_token and any(choice.first_token_at for choice in choices):
                    has_token = True
                    self._metrics.ttft.observe(time.monotonic() - started_at)
                yield event
        yield Completed(total_usage(choices, num_prompt_tokens, started_at))

    def _choice(
        self, plan: _Plan, info: WorkerInfo, number: int, seed_offset: int, prompt: TokenIds, deadline: float
    ) -> Choice:
        options = plan.options
        if options.seed is not None:
            # equal seeds would make equal choices
            options = replace(options, seed=(options.seed + seed_offset) % 2**63)
        sampling = resolve_sampling(
            options, self._defaults, info, len(prompt), plan.default_max_tokens, plan.prompt_param
        )
        timeout_s = deadline - time.monotonic()
        if timeout_s <= 0:
            raise RequestTimeout(self._config.request_timeout_s)
        request = WorkerRequest(
            internal_id(plan.request_id, number),
            prompt,
            sampling,
            options.carrel,
            timeout_s,
            plan.caller,
            options.session_id or "",
        )
        return Choice(number, request, options.stop, plan.lead, self._tokenizer, self._worker, self._metrics)

    async def _encode(self, prompt: str | TokenIds, info: WorkerInfo, options: GenerationOptions) -> TokenIds:
        match prompt:
            case str():
                return await self._prompts.text(prompt, True, info, options.max_tokens or 1, "prompt")
            case _:
                return self._prompts.ids(prompt, info, "prompt")
