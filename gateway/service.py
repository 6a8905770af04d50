"""The gateway's one service: chat and completion, whatever the protocol."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from carrel.process.request_limits import (
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    RANGES,
    check_request,
    check_token_ids,
    num_output_tokens,
)
from gateway.admission import Admission, Place
from gateway.auth import KeyRing
from gateway.choice import Choice
from gateway.choices import Choices, total_usage
from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest, RequestTimeout, UnknownModel, WorkerUnavailable, invalid_requests
from gateway.exchange import (
    ChatRequest,
    ChoiceFinished,
    Completed,
    CompletionRequest,
    Event,
    Generation,
    GenerationOptions,
    TokenIds,
)
from gateway.metrics import Metrics
from gateway.prefill_progress import PrefillProgress
from gateway.prompts import PromptEncoder, check_text
from gateway.read_ahead import read_ahead
from gateway.sessions import Sessions
from gateway.tokenizer import Tokenizer
from gateway.worker_client import WorkerClient, own_edition
from gateway.worker_status import Rehearsal, WorkerStatus
from gpu_worker.v1 import gpu_worker_pb2 as pb

# of the worker's seats, that one request may have at once
SEAT_SHARE = 0.5
# of a request, that wait for a reader before its worker does: tokens, or pieces of text
READ_AHEAD_EVENTS = 256
# what OpenAI's completions default to
COMPLETION_MAX_TOKENS = 16
# prompts in JSON with every character escaped fit: six bytes each, and a token has several
BODY_BYTES_PER_TOKEN = 32
MIN_BODY_BYTES = 2**20
# while the worker's maximum length is not known
UNKNOWN_BODY_BYTES = 64 * 2**20

_PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = logging.getLogger(__name__)


def public_id(asked: str | None) -> str:
    """The client's own request id if it is short and plain, else a new one: an id goes into headers and logs."""
    return asked if asked and _PLAIN_ID.fullmatch(asked) else uuid.uuid4().hex


@dataclass(frozen=True)
class _Plan:
    """A request on its way; `encode` makes its prompts, given the model's maximum length, which `default_max_tokens` 0
    fills."""

    request_id: str
    endpoint: str
    prompt_param: str
    num_prompts: int
    encode: Callable[[int], Awaitable[tuple[TokenIds, ...]]]
    default_max_tokens: int
    options: GenerationOptions
    lead: str

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.options.n

    @property
    def caller(self) -> bytes:
        return self.options.draft.prefix_salt


class ChatService:
    """Checks and tokenizes requests, runs them on the worker and turns tokens into text.

    Must be built inside the event loop. Every error that a caller may see is a ServiceError. `more_metrics` gives
    Prometheus text of its own; `rehearsal` comes before this is ready; requests are logged at `log_level`.
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
    ) -> None:
        self._config = config
        self._worker = worker
        self._tokenizer = tokenizer
        self._prompts = PromptEncoder(tokenizer)
        self._defaults = defaults
        self._metrics = Metrics(self.model_name)
        self._more_metrics = more_metrics
        self._log_level = log_level
        self._keys = KeyRing(config.api_keys, config.api_key_weights)
        self.admission = Admission(config.max_concurrent, config.max_per_key)
        self.status = WorkerStatus(worker, self.admission, rehearsal)
        self.sessions = Sessions(worker, self.status, self.admission)

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._config.model_names

    @property
    def model_name(self) -> str:
        """The name in answers."""
        return self.model_names[0]

    def chat(self, request: ChatRequest) -> Generation:
        """Continue a chat. Nothing happens until the events are iterated; errors come with the first of them."""
        options = request.options

        async def encode(max_model_len: int) -> tuple[TokenIds, ...]:
            max_tokens = options.draft.sampling.max_tokens or 1
            return (await self._prompts.chat(request, max_model_len, max_tokens),)

        lead = self._tokenizer.answer_lead if request.adds_generation_prompt else ""
        request_id = public_id(request.request_id)
        return self._generation(_Plan(request_id, "chat", "messages", 1, encode, 0, options, lead))

    def completion(self, request: CompletionRequest) -> Generation:
        """Continue each prompt, as `chat` does; choice `i * n + j` is the j-th continuation of prompt i."""
        options = request.options

        async def encode(max_model_len: int) -> tuple[TokenIds, ...]:
            return tuple([await self._encode(prompt, max_model_len, options) for prompt in request.prompts])

        request_id, num_prompts = public_id(request.request_id), len(request.prompts)
        return self._generation(
            _Plan(request_id, "completion", "prompt", num_prompts, encode, COMPLETION_MAX_TOKENS, options, "")
        )

    async def tokenize_text(self, text: str, add_special_tokens: bool, caller: bytes) -> TokenIds:
        with self.admission.place(caller):
            max_model_len = (await self.status.info()).max_model_len
            return await self._prompts.text(text, add_special_tokens, max_model_len, 1, "prompt")

    async def tokenize_chat(self, request: ChatRequest, caller: bytes) -> TokenIds:
        with self.admission.place(caller):
            return await self._prompts.chat(request, (await self.status.info()).max_model_len, 1)

    async def detokenize(self, token_ids: TokenIds, caller: bytes) -> str:
        with self.admission.place(caller):
            with invalid_requests():
                check_token_ids("tokens", token_ids, (await self.status.info()).vocab_size)
            return await asyncio.to_thread(self._tokenizer.decode, token_ids)

    async def max_body_bytes(self) -> int:
        """The largest request body that is read."""
        if self._config.max_body_bytes is not None:
            return self._config.max_body_bytes
        try:
            info = self.status.latest or await self.status.info()
        except WorkerUnavailable:
            return UNKNOWN_BODY_BYTES
        return max(MIN_BODY_BYTES, info.max_model_len * BODY_BYTES_PER_TOKEN)

    async def render_metrics(self) -> bytes:
        """Prometheus text: the gateway's own metrics, the worker's while it answers, and what else there is."""
        return self._metrics.render(await self.status.stats()) + self._more_metrics()

    def check_model(self, model: str | None) -> None:
        """Raises UnknownModel; no name at all means the one that is served."""
        if model and model not in (*self.model_names, self._config.model):
            raise UnknownModel(model, self.model_name)

    def _generation(self, plan: _Plan) -> Generation:
        # the place is the worker's time, not the reader's
        events = read_ahead(self._counted(plan), READ_AHEAD_EVENTS)
        return Generation(plan.request_id, self.model_name, int(time.time()), events)

    async def _counted(self, plan: _Plan) -> AsyncGenerator[Event, None]:
        """The request's events, with its place held, its metrics kept and one log line at its end."""
        started_at = time.monotonic()
        outcome = "cancelled"
        try:
            with self.admission.place(plan.caller) as place, self._metrics.running.track_inprogress():
                async with aclosing(self._run(plan, started_at, place)) as events:
                    async for event in events:
                        match event:
                            case ChoiceFinished(finish_reason=reason):
                                outcome = reason
                        yield event
        except WorkerUnavailable:
            outcome = WorkerUnavailable.__name__
            self.status.forget()
            raise
        except RequestTimeout as error:
            outcome = RequestTimeout.__name__
            # a choice knows only what was left of the time
            raise RequestTimeout(self._config.request_timeout_s) from error
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            took_s = time.monotonic() - started_at
            self._metrics.e2e.observe(took_s)
            self._metrics.count_request(plan.endpoint, outcome)
            log.log(self._log_level, "%s %s: %s in %.3f s", plan.endpoint, plan.request_id, outcome, took_s)

    async def _run(self, plan: _Plan, started_at: float, place: Place) -> AsyncGenerator[Event, None]:
        self.check_model(plan.options.model)
        info = await self.status.info()
        _check(plan, info)
        if (kept := plan.options.truncate_to) is None:
            prompts = await plan.encode(info.max_model_len)
        else:
            # what is left out need not fit
            prompts = tuple(prompt[-kept:] for prompt in await plan.encode(sys.maxsize))
        deadline = started_at + self._config.request_timeout_s
        num_prompt_tokens = [len(prompt) for prompt in prompts]
        progress = PrefillProgress(num_prompt_tokens, plan.options.n)
        choices = [
            [
                self._choice(plan, info, at * plan.options.n + index, index, prompt, deadline, progress)
                for index in range(plan.options.n)
            ]
            for at, prompt in enumerate(prompts)
        ]
        self._metrics.prompt_tokens.inc(sum(num_prompt_tokens))
        has_token = False
        running = Choices(choices, max(1, int(info.max_num_seqs * SEAT_SHARE)), place)
        async with aclosing(running.events()) as events:
            async for event in events:
                if not has_token and any(each.first_token_at for of_prompt in choices for each in of_prompt):
                    has_token = True
                    self._metrics.ttft.observe(time.monotonic() - started_at)
                yield event
        yield Completed(total_usage(choices, num_prompt_tokens, started_at))

    def _choice(
        self,
        plan: _Plan,
        info: pb.GetInfoResponse,
        number: int,
        seed_offset: int,
        prompt: TokenIds,
        deadline: float,
        progress: PrefillProgress,
    ) -> Choice:
        if not prompt:
            raise InvalidRequest("The prompt is empty: give at least one token.", plan.prompt_param)
        edition = own_edition()
        request = pb.GenerateRequest(
            # no client can guess another's
            request_id=f"{plan.request_id}-{number}-{uuid.uuid4().hex[:16]}",
            prompt_token_ids=prompt,
            sampling=self._defaults,
            edition=pb.Edition(version=edition.version, messages=edition.messages),
            weight=self._keys.weight(plan.caller),
        )
        request.MergeFrom(plan.options.draft)
        sampling, room = request.sampling, info.max_model_len - len(prompt)
        if sampling.HasField("seed"):
            # equal seeds would make equal choices
            sampling.seed = (sampling.seed + seed_offset) % 2**63
        if not sampling.HasField("max_tokens") and 0 < plan.default_max_tokens < room:
            sampling.max_tokens = plan.default_max_tokens
        with invalid_requests():
            sampling.max_tokens = num_output_tokens(
                sampling, len(prompt), info.max_model_len, plan.prompt_param
            )
        return Choice(
            number,
            request,
            deadline,
            plan.options.stop,
            plan.lead,
            self._tokenizer,
            self._worker,
            self._metrics,
            progress,
        )

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


def _check(plan: _Plan, info: pb.GetInfoResponse) -> None:
    """All that needs no prompt. Raises InvalidRequest that names the field."""
    options = plan.options
    with invalid_requests():
        check_request(options.draft, info)
    check_text(options.draft.session_id, "session_id")
    check_text(options.draft.cache_salt, "cache_salt")
    if options.n not in RANGES["n"]:
        raise InvalidRequest(f"n must be in {RANGES['n']}.", "n")
    if not 0 < plan.num_choices <= MAX_CHOICES:
        raise InvalidRequest(
            f"{plan.num_prompts} prompts with n={options.n}: a request may have 1 to {MAX_CHOICES} choices.",
            plan.prompt_param,
        )
    if len(options.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{len(options.stop)} stop strings: give at most {MAX_STOP_STRINGS}.", "stop")
    for stop in options.stop:
        check_text(stop, "stop")
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"A stop string must have 1 to {MAX_STOP_CHARS} characters.", "stop")
