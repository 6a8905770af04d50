"""The gateway's one service: chat and completion, whatever the protocol."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from carrel.process.request_limits import check_token_ids
from carrel.process.tracing import NoTracer, Tracer
from gateway.admission import Admission, Place
from gateway.answer_text import StopMatcher
from gateway.attention import AttentionViews, WatchedWorker
from gateway.auth import KeyRing
from gateway.body_limits import BodyLimits
from gateway.choice import Choice
from gateway.choices import Choices, total_usage
from gateway.config import GatewayConfig
from gateway.dialect import Dialect
from gateway.errors import RequestTimeout, UnknownModel, WorkerUnavailable, invalid_requests
from gateway.exchange import (
    ChatRequest,
    ChoiceFinished,
    Completed,
    CompletionRequest,
    Echo,
    Event,
    Generation,
    GenerationOptions,
    TokenIds,
)
from gateway.key_file import KeyFile
from gateway.metrics import Metrics
from gateway.plan import Plan
from gateway.prefill_progress import PrefillProgress
from gateway.prompts import PromptEncoder
from gateway.rate_limits import RateLimits
from gateway.read_ahead import read_ahead
from gateway.sessions import Sessions
from gateway.tokenizer import Tokenizer
from gateway.traced import traced
from gateway.worker_client import WorkerClient, own_edition
from gateway.worker_status import Rehearsal, WorkerStatus
from gpu_worker.v1 import gpu_worker_pb2 as pb

# of the worker's seats, that one request may have at once
SEAT_SHARE = 0.5
# of a request, that wait for a reader before its worker does: tokens, or pieces of text
READ_AHEAD_EVENTS = 256
# what OpenAI's completions default to
COMPLETION_MAX_TOKENS = 16

PLAIN_ID = r"[A-Za-z0-9._-]{1,64}"

log = logging.getLogger(__name__)


def public_id(asked: str | None) -> str:
    """The client's own request id if it is short and plain, else a new one: an id goes into headers and logs."""
    return asked if asked and re.fullmatch(PLAIN_ID, asked) else uuid.uuid4().hex


class ChatService:
    """Checks and tokenizes requests, runs them on the worker and turns tokens into text.

    Must be built inside the event loop. Every error that a caller may see is a ServiceError. `more_metrics` gives
    Prometheus text of its own; `rehearsal` comes before this is ready; requests are logged at `log_level`; `tracer`
    takes a span of each.
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
        self.attention = AttentionViews()
        self._worker = WatchedWorker(worker, self.attention)
        self._tokenizer = tokenizer
        self._prompts = PromptEncoder(tokenizer)
        self._dialect = Dialect(tokenizer, config.tool_call_parser, config.reasoning_parser)
        self._defaults = defaults
        self.metrics = Metrics(self.model_name)
        self._more_metrics = more_metrics
        self._log_level = log_level
        self._tracer = tracer or NoTracer()
        file = None if config.api_keys_file is None else KeyFile(config.api_keys_file)
        self.keys = KeyRing(config.api_keys, config.api_key_weights, file)
        self.rate_limits = RateLimits(self.keys)
        self.admission = Admission(config.max_concurrent, self._places_of)
        self.metrics.draining.set_function(lambda: self.admission.is_draining)
        self.status = WorkerStatus(worker, self.admission, rehearsal)
        self.bodies = BodyLimits(self.status, config.max_body_bytes)
        self.sessions = Sessions(worker, self.status, self.admission)

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._config.model_names

    @property
    def model_name(self) -> str:
        """The name in answers."""
        return self.model_names[0]

    def chat(self, request: ChatRequest) -> Generation:
        """Continue a chat. Nothing happens until the events are iterated; errors come with the first of them, but for
        those of its tools. Raises InvalidRequest."""
        request = self._dialect.prepare(request)
        options = request.options

        async def encode(max_model_len: int) -> tuple[TokenIds, ...]:
            max_tokens = options.draft.sampling.max_tokens or 1
            written = await asyncio.to_thread(self._dialect.written, request)
            return (await self._prompts.chat(written, max_model_len, max_tokens),)

        lead = self._tokenizer.answer_lead if request.adds_generation_prompt else ""
        request_id = public_id(request.request_id)
        return self._generation(
            Plan(
                request_id,
                "chat",
                "messages",
                1,
                encode,
                0,
                options,
                lead,
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
        return self._generation(
            Plan(request_id, "completion", "prompt", num_prompts, encode, most, options, echo=echo)
        )

    async def tokenize_text(self, text: str, add_special_tokens: bool, caller: bytes) -> TokenIds:
        with self.admission.place(caller):
            max_model_len = (await self.status.info()).max_model_len
            return await self._prompts.text(text, add_special_tokens, max_model_len, 1, "prompt")

    async def tokenize_chat(self, request: ChatRequest, caller: bytes) -> TokenIds:
        with self.admission.place(caller):
            written = await asyncio.to_thread(self._dialect.written, self._dialect.prepare(request))
            return await self._prompts.chat(written, (await self.status.info()).max_model_len, 1)

    async def token_names(self, token_ids: TokenIds, caller: bytes) -> list[str]:
        """What the vocabulary calls each."""
        with self.admission.place(caller):
            return await asyncio.to_thread(self._tokenizer.names, token_ids)

    async def detokenize(self, token_ids: TokenIds, caller: bytes) -> str:
        with self.admission.place(caller):
            with invalid_requests():
                check_token_ids("tokens", token_ids, (await self.status.info()).vocab_size)
            return await asyncio.to_thread(self._tokenizer.decode_prompt, token_ids)

    async def render_metrics(self) -> bytes:
        """Prometheus text: the gateway's own metrics, the worker's and the store's while they answer, and what else
        there is."""
        worker, store = await asyncio.gather(self.status.stats(), self.status.store_stats())
        return self.metrics.render(worker, store) + self._more_metrics()

    def check_model(self, model: str | None) -> None:
        """Raises UnknownModel; no name at all means the one that is served."""
        if model and model not in (*self.model_names, self._config.model):
            raise UnknownModel(model, self.model_name)

    def _generation(self, plan: Plan) -> Generation:
        # the place is the worker's time, not the reader's
        events = traced(self._tracer, plan, self.model_name, self._counted(plan))
        ahead = read_ahead(events, READ_AHEAD_EVENTS)
        return Generation(plan.request_id, self.model_name, int(time.time()), ahead)

    async def _counted(self, plan: Plan) -> AsyncGenerator[Event, None]:
        """The request's events, with its place held, its metrics kept and one log line at its end."""
        started_at = time.monotonic()
        outcome, has_begun = "cancelled", False
        try:
            with self.admission.place(plan.caller) as place, self.metrics.running.track_inprogress():
                self.rate_limits.take_request(plan.caller)
                async with aclosing(self._run(plan, started_at, place)) as events:
                    async for event in events:
                        match event:
                            case ChoiceFinished(finish_reason=reason):
                                outcome = reason
                        has_begun = True
                        yield event
        except Exception as error:
            outcome = type(error).__name__
            if not has_begun:
                self.metrics.count_rejected(error)
            match error:
                case WorkerUnavailable():
                    self.status.forget()
                case RequestTimeout():
                    # a choice knows only what was left of the time
                    raise RequestTimeout(self._timeout_s(plan)) from error
            raise
        finally:
            took_s = time.monotonic() - started_at
            self.metrics.e2e.observe(took_s)
            self.metrics.count_request(plan.endpoint, outcome, self.keys.name(plan.caller))
            log.log(self._log_level, "%s %s: %s in %.3f s", plan.endpoint, plan.request_id, outcome, took_s)

    async def _run(self, plan: Plan, started_at: float, place: Place) -> AsyncGenerator[Event, None]:
        self.check_model(plan.options.model)
        info = await self.status.info()
        plan.check(info)
        prompts = await plan.prompts(info.max_model_len)
        deadline = started_at + self._timeout_s(plan)
        num_prompt_tokens = [len(prompt) for prompt in prompts]
        progress = PrefillProgress(num_prompt_tokens, plan.options.n)
        choices = []
        for at, prompt in enumerate(prompts):
            echo = await plan.echo(at, prompt)
            first = at * plan.options.n
            choices.append(
                [
                    await self._choice(plan, info, first + index, index, prompt, echo, deadline, progress)
                    for index in range(plan.options.n)
                ]
            )
        has_token, parts = False, plan.parts(prompts[0])
        running = Choices(choices, max(1, int(info.max_num_seqs * SEAT_SHARE)), place)
        with self._charged(plan, info, choices, num_prompt_tokens):
            async with aclosing(running.events()) as events:
                async for event in events:
                    if not has_token and any(
                        each.first_token_at for of_prompt in choices for each in of_prompt
                    ):
                        has_token = True
                        self.metrics.ttft.observe(time.monotonic() - started_at)
                    for part in [event] if parts is None else parts.events(event):
                        yield part
        yield Completed(total_usage(choices, num_prompt_tokens, started_at))

    @contextmanager
    def _charged(
        self,
        plan: Plan,
        info: pb.GetInfoResponse,
        choices: list[list[Choice]],
        num_prompt_tokens: Sequence[int],
    ) -> Iterator[None]:
        """Count what a request uses, and against its key's limits. Raises TooManyRequests."""
        caller, name, num_prompt = plan.caller, self.keys.name(plan.caller), sum(num_prompt_tokens)
        every = [choice for of_prompt in choices for choice in of_prompt]
        # `n` choices of a prompt share its rows, and each has its answer
        num_rows = num_prompt + sum(choice.max_tokens for choice in every)
        with self.rate_limits.arena(caller, num_rows * info.arena_token_bytes):
            self.rate_limits.take_prompt(caller, num_prompt)
            self.metrics.count_prompt(num_prompt, name)
            try:
                yield
            finally:
                num_generated = sum(choice.num_tokens for choice in every)
                self.rate_limits.add_answer(caller, num_generated)
                self.metrics.count_answer(num_generated, name)

    def _places_of(self, caller: bytes) -> int | None:
        own = self.keys.limits(caller).max_concurrent
        return self._config.max_per_key(self.keys.num_keys) if own is None else own

    async def _choice(
        self,
        plan: Plan,
        info: pb.GetInfoResponse,
        number: int,
        seed_offset: int,
        prompt: TokenIds,
        echo: Echo | None,
        deadline: float,
        progress: PrefillProgress,
    ) -> Choice:
        edition = own_edition()
        request = pb.GenerateRequest(
            # no client can guess another's
            request_id=f"{plan.request_id}-{number}-{uuid.uuid4().hex[:16]}",
            sampling=self._defaults,
            edition=pb.Edition(version=edition.version, messages=edition.messages),
            weight=self.keys.weight(plan.caller),
        )
        await plan.request(request, seed_offset, prompt, info.max_model_len)
        return Choice(
            number,
            request,
            deadline,
            StopMatcher(plan.options.stop, plan.options.keeps_stop),
            plan.lead,
            self._tokenizer,
            self._worker,
            self.metrics,
            progress,
            echo,
            self._tokenizer.decode_all if plan.shows_special or plan.options.shows_special else None,
        )

    def _timeout_s(self, plan: Plan) -> float:
        asked = plan.options.timeout_s
        return self._config.request_timeout_s if asked is None else min(asked, self._config.request_timeout_s)

    async def _echo(self, request: CompletionRequest, at: int, prompt: TokenIds) -> Echo:
        match request.prompts[at]:
            case str() as text if request.options.truncate_to is None:
                return Echo(text, request.only_echoes)
            case _:
                text = await asyncio.to_thread(self._tokenizer.decode_prompt, prompt)
                return Echo(text, request.only_echoes)

    async def _encode(
        self, prompt: str | TokenIds, max_model_len: int, options: GenerationOptions
    ) -> TokenIds:
        match prompt:
            case str():
                max_tokens = options.draft.sampling.max_tokens or 1
                adds_special = options.add_special_tokens is not False
                return await self._prompts.text(prompt, adds_special, max_model_len, max_tokens, "prompt")
            case _:
                # the worker knows which ids there are
                return prompt
