"""The gateway's one service: chat and completion, whatever the protocol."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from carrel.process.request_limits import check_token_ids
from carrel.process.tracing import NoTracer, Tracer
from gateway.admission import Admission
from gateway.attention import AttentionViews, WatchedWorker
from gateway.auth import KeyRing
from gateway.body_limits import BodyLimits
from gateway.config import GatewayConfig
from gateway.dialect import Dialect
from gateway.errors import invalid_requests
from gateway.exchange import (
    ChatRequest,
    CompletionRequest,
    Echo,
    Generation,
    GenerationOptions,
    TokenIds,
    public_id,
)
from gateway.heavy_work import CallerWork, HeavyWork
from gateway.key_file import KeyFile
from gateway.metrics import Metrics
from gateway.plan import Plan
from gateway.plan_runner import PlanRunner
from gateway.prompts import PromptEncoder, chat_size
from gateway.rate_limits import RateLimits
from gateway.sessions import Sessions
from gateway.tasks import Joined
from gateway.tokenizer import Tokenizer
from gateway.worker_client import WorkerClient
from gateway.worker_status import Rehearsal, WorkerStatus
from gpu_worker.v1 import gpu_worker_pb2 as pb

# what OpenAI's completions default to
COMPLETION_MAX_TOKENS = 16
# about what a token is in text
TOKEN_CHARS = 4


class ChatService:
    """The gateway's work in any protocol: run requests as plans, turn texts into tokens and tokens into texts.

    Must be built inside the event loop. Every error that a caller may see is a ServiceError. `more_metrics` gives
    Prometheus text of its own; `rehearsal` comes before this is ready; `log_level` and `tracer` are those of a
    `PlanRunner`.
    """

    def __init__(
        self,
        config: GatewayConfig,
        worker: WorkerClient,
        tokenizer: Tokenizer,
        defaults: pb.SamplingParams,
        more_metrics: Callable[[], bytes] = bytes,
        rehearsal: Rehearsal | None = None,
        log_level: int = logging.INFO,
        tracer: Tracer | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._prompts = PromptEncoder(tokenizer)
        self._dialect = Dialect(tokenizer, config.tool_call_parser, config.reasoning_parser)
        self.metrics = Metrics(self.model_name)
        self._more_metrics = more_metrics
        self.render_metrics = Joined(self._render_metrics)
        file = None if config.api_keys_file is None else KeyFile(config.api_keys_file)
        self.keys = KeyRing(config.api_keys, file)
        self.attention = AttentionViews(self._has_several_keys)
        self.rate_limits = RateLimits(self.keys)
        self.admission = Admission(config.max_concurrent, self._places_of)
        self.metrics.draining.set_function(lambda: self.admission.is_draining)
        self.status = WorkerStatus(worker, self.admission, rehearsal)
        self.work = HeavyWork(has_several_keys=self._has_several_keys)
        self.bodies = BodyLimits(
            self.status, config.max_body_bytes, self.work, config.max_incoming_bytes, config.body_timeout_s
        )
        self.metrics.incoming.set_function(lambda: self.bodies.room.num_bytes)
        self.sessions = Sessions(worker, self.status, self.admission)
        self._runner = PlanRunner(
            config,
            WatchedWorker(worker, self.attention),
            self.status,
            tokenizer,
            defaults,
            self.admission,
            self.keys,
            self.rate_limits,
            self.metrics,
            self.work,
            tracer or NoTracer(),
            log_level,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._config.model_names

    @property
    def model_name(self) -> str:
        """The name in answers."""
        return self.model_names[0]

    @property
    def template_names(self) -> frozenset[str] | None:
        """The variables of `Dialect` that the chat template reads; None: hints of clients are refused."""
        return None if self._config.strict_fields else self._dialect.template_names

    def chat(self, request: ChatRequest) -> Generation:
        """Continue a chat. Nothing happens until the events are iterated; errors come with the first of them, but for
        those of its tools. Raises InvalidRequest."""
        is_verbatim = request.options.draft.HasField("grammar")
        request = self._dialect.prepare(request)
        options = request.options

        async def encode(max_model_len: int) -> tuple[TokenIds, ...]:
            max_tokens = options.draft.sampling.max_tokens or 1
            return (await self._encode_chat(request, max_model_len, max_tokens, self._work_of(options)),)

        lead = self._tokenizer.answer_lead if request.adds_generation_prompt else ""
        request_id = public_id(request.request_id)
        return self._runner.start(
            Plan(
                request_id,
                "chat",
                "messages",
                1,
                encode,
                0,
                options,
                lead,
                is_verbatim,
                parts=lambda prompt: self._dialect.parts(request, prompt),
                shows_special=self._dialect.shows_special_tokens(request),
            )
        )

    def completion(self, request: CompletionRequest) -> Generation:
        """Continue each prompt, as `chat` does; choice `i * n + j` is the j-th continuation of prompt i."""
        options = request.options

        async def encode(max_model_len: int) -> tuple[TokenIds, ...]:
            return tuple([await self._encode(prompt, max_model_len, options) for prompt in request.prompts])

        async def echo(at: int, prompt: TokenIds) -> Echo | None:
            return await self._echo(request, at, prompt) if request.echoes else None

        request_id, num_prompts = public_id(request.request_id), len(request.prompts)
        most = COMPLETION_MAX_TOKENS
        is_verbatim = options.draft.HasField("grammar")
        return self._runner.start(
            Plan(
                request_id,
                "completion",
                "prompt",
                num_prompts,
                encode,
                most,
                options,
                is_verbatim=is_verbatim,
                echo=echo,
            )
        )

    async def tokenize_text(self, text: str, add_special_tokens: bool, caller: bytes) -> TokenIds:
        with self.admission.place(caller):
            max_model_len = (await self.status.info()).max_model_len
            work = self.work.of(caller)
            return await self._prompts.text(text, add_special_tokens, max_model_len, 1, "prompt", work)

    async def tokenize_chat(self, request: ChatRequest, caller: bytes) -> TokenIds:
        with self.admission.place(caller):
            prepared = self._dialect.prepare(request)
            max_model_len = (await self.status.info()).max_model_len
            return await self._encode_chat(prepared, max_model_len, 1, self.work.of(caller))

    async def token_names(self, token_ids: TokenIds, caller: bytes) -> list[str]:
        """Return the vocabulary's name of each token."""
        with self.admission.place(caller):
            size = TOKEN_CHARS * len(token_ids)
            return await self.work.answer(caller, size, self._tokenizer.names, token_ids)

    async def detokenize(self, token_ids: TokenIds, caller: bytes) -> str:
        with self.admission.place(caller):
            with invalid_requests():
                check_token_ids("tokens", token_ids, (await self.status.info()).vocab_size)
            size = TOKEN_CHARS * len(token_ids)
            return await self.work.run(caller, size, self._tokenizer.decode_prompt, token_ids)

    async def _render_metrics(self) -> bytes:
        """Prometheus text: the gateway's own metrics, the worker's and the store's while they answer, and what else
        there is."""
        worker, store = await asyncio.gather(self.status.stats(), self.status.store_stats())
        return self.metrics.render(worker, store) + self._more_metrics()

    def check_model(self, model: str | None) -> None:
        """Raises UnknownModel; no name at all means the one that is served."""
        self._runner.check_model(model)

    def _work_of(self, options: GenerationOptions) -> CallerWork:
        return self.work.of(options.draft.prefix_salt)

    async def _encode_chat(
        self, prepared: ChatRequest, max_model_len: int, max_tokens: int, work: CallerWork
    ) -> TokenIds:
        written = await work.run(chat_size(prepared), self._dialect.written, prepared)
        return await self._prompts.chat(written, max_model_len, max_tokens, work)

    def _has_several_keys(self) -> bool:
        return self.keys.num_keys > 1

    def _places_of(self, caller: bytes) -> int | None:
        own = self.keys.limits(caller).max_concurrent
        return self._config.max_per_key(self.keys.num_keys) if own is None else own

    async def _echo(self, request: CompletionRequest, at: int, prompt: TokenIds) -> Echo:
        match request.prompts[at]:
            case str() as text if request.options.truncate_to is None:
                return Echo(text, request.only_echoes)
            case _:
                size = TOKEN_CHARS * len(prompt)
                work = self._work_of(request.options)
                text = await work.answer(size, self._tokenizer.decode_prompt, prompt)
                return Echo(text, request.only_echoes)

    async def _encode(
        self, prompt: str | TokenIds, max_model_len: int, options: GenerationOptions
    ) -> TokenIds:
        match prompt:
            case str():
                max_tokens = options.draft.sampling.max_tokens or 1
                adds_special = options.add_special_tokens is not False
                work = self._work_of(options)
                return await self._prompts.text(
                    prompt, adds_special, max_model_len, max_tokens, "prompt", work
                )
            case _:
                # the worker knows which ids there are
                return prompt
