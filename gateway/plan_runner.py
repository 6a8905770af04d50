"""Requests on their way: each has its place and its span, is counted and charged, and its choices run at the worker."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from carrel.process.request_context import RequestContext, current_request, working_for
from carrel.process.tracing import Tracer
from gateway.admission import Admission, Place
from gateway.answer_text import StopMatcher
from gateway.auth import KeyRing
from gateway.choice import Choice
from gateway.choices import Choices, total_usage
from gateway.config import GatewayConfig
from gateway.errors import RequestTimeout, UnknownModel, WorkerUnavailable
from gateway.exchange import ChoiceFinished, Completed, Echo, Event, Generation, TokenIds
from gateway.heavy_work import HeavyWork
from gateway.metrics import Metrics
from gateway.plan import Plan
from gateway.progress import PrefillProgress
from gateway.rate_limits import RateLimits
from gateway.tasks import read_ahead
from gateway.tokenizer import Tokenizer
from gateway.worker_client import TokenSource, own_edition
from gateway.worker_status import WorkerStatus
from gpu_worker.v1 import gpu_worker_pb2 as pb


async def traced(
    tracer: Tracer, plan: Plan, model: str, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[Event, None]:
    """The request's events, which are closed with this; what brings them, and what is logged meanwhile, is part of the
    span. To be iterated and closed by one task."""
    request = current_request()
    span = tracer.start(
        plan.endpoint,
        None if request is None else request.trace,
        {
            "carrel.request_id": plan.request_id,
            "gen_ai.operation.name": plan.endpoint,
            "gen_ai.request.model": model,
            "carrel.choices": plan.num_choices,
        },
    )
    # what a reader that leaves is, too
    error = "cancelled"
    try:
        with working_for(RequestContext(plan.request_id, span.trace)):
            async with aclosing(events):
                async for event in events:
                    match event:
                        case Completed(usage):
                            span.tell(
                                {
                                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                                    "carrel.ttft_ms": usage.ttft_ms,
                                }
                            )
                    yield event
        error = ""
    except Exception as failure:
        error = type(failure).__name__
        raise
    finally:
        span.end(error)


# of the worker's seats, that one request may have at once
SEAT_SHARE = 0.5
# of a request, that wait for a reader before its worker does: tokens, or pieces of text
READ_AHEAD_EVENTS = 256

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanRunner:
    """Runs plans. A request is logged at `log_level` when it ends; `tracer` takes a span of each."""

    config: GatewayConfig
    worker: TokenSource
    status: WorkerStatus
    tokenizer: Tokenizer
    defaults: pb.SamplingParams
    admission: Admission
    keys: KeyRing
    rate_limits: RateLimits
    metrics: Metrics
    work: HeavyWork
    tracer: Tracer
    log_level: int

    def start(self, plan: Plan) -> Generation:
        """Nothing happens until the events are iterated; errors come with the first of them."""
        # the place is the worker's time, not the reader's
        events = traced(self.tracer, plan, self.config.model_names[0], self._counted(plan))
        ahead = read_ahead(events, READ_AHEAD_EVENTS, self.admission.cut_with_all())
        return Generation(plan.request_id, self.config.model_names[0], int(time.time()), ahead)

    def check_model(self, model: str | None) -> None:
        """Raises UnknownModel; no name at all means the one that is served."""
        if model and not self.config.serves(model):
            raise UnknownModel(model, self.config.model_names[0])

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
            log.log(self.log_level, "%s %s: %s in %.3f s", plan.endpoint, plan.request_id, outcome, took_s)

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
            sampling=self.defaults,
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
            self.tokenizer,
            self.worker,
            self.metrics,
            progress,
            self.work.of(plan.caller),
            echo,
            self.tokenizer.decode_all if plan.shows_special or plan.options.shows_special else None,
            plan.is_verbatim,
        )

    def _timeout_s(self, plan: Plan) -> float:
        asked = plan.options.timeout_s
        return self.config.request_timeout_s if asked is None else min(asked, self.config.request_timeout_s)
