"""The choices of a request: each from the worker's tokens to text with an end, all of them as one stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from gateway.answer_text import AnswerLead, StopMatcher
from gateway.detokenizer import Detokenizer
from gateway.errors import GenerationFailed, ServiceError, WorkerUnavailable
from gateway.exchange import ChoiceFinished, Event, TextDelta, TokenLogprob, Usage
from gateway.metrics import Metrics
from gateway.phases import Phases
from gateway.prefill_progress import PrefillProgress
from gateway.tokenizer import Tokenizer
from gateway.worker_client import WorkerClient
from gpu_worker.v1 import gpu_worker_pb2 as pb

ABORT_TIMEOUT_S = 2.0
MAX_PENDING_EVENTS = 64
FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}

log = logging.getLogger(__name__)


class Choice:
    """Iterate `events` once. `num_tokens`, `usage` and `first_token_at` are filled on the way.

    `timeout_s` is the worker call's deadline; `progress` is the request's, of all its choices; `lead` is white space
    that the text may begin with and that is left out (see AnswerLead). `usage` stays None when a stop string ended the
    choice and the worker's account did not arrive in time.
    """

    def __init__(
        self,
        index: int,
        request: pb.GenerateRequest,
        timeout_s: float,
        stops: tuple[str, ...],
        lead: str,
        tokenizer: Tokenizer,
        worker: WorkerClient,
        metrics: Metrics,
        progress: PrefillProgress,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.usage: pb.Usage | None = None
        self._request = request
        self._timeout_s = timeout_s
        self._stops = StopMatcher(stops)
        self._lead = AnswerLead(lead)
        self._detokenizer = Detokenizer(tokenizer.decode, request.prompt_token_ids)
        self._tokenizer = tokenizer
        self._worker = worker
        self._metrics = metrics
        self._phases = Phases(metrics)
        self._progress = progress

    @property
    def first_token_at(self) -> float | None:
        return self._phases.first_token_at

    async def events(self) -> AsyncGenerator[Event, None]:
        """Text as it becomes certain, then one ChoiceFinished. Closing this frees the worker's room."""
        self._phases.enter_queue()
        finish_reason: str | None = None
        async with aclosing(self._worker.generate(self._request, self._timeout_s)) as stream:
            async for event in stream:
                match event.WhichOneof("event"):
                    case "progress":
                        self._phases.begin_prefill()
                        computed, cached = event.progress.computed_tokens, event.progress.cached_tokens
                        if (told := self._progress.take(self.index, computed, cached)) is not None:
                            yield told
                    case "token":
                        delta = self._take(event.token)
                        if delta.text or delta.logprobs or self.num_tokens == 1:
                            yield delta
                        if self._stops.has_stopped:
                            await self._end_early(stream)
                            break
                    case "complete":
                        finish_reason = self._complete(event.complete)
                        if text := self._flush():
                            yield TextDelta(self.index, text)
                        break
        if self._stops.has_stopped:
            finish_reason = "stop"
        if finish_reason is None:
            raise GenerationFailed("The model worker ended the stream too early.")
        self._phases.end()
        yield ChoiceFinished(self.index, finish_reason)

    def _take(self, token: pb.Token) -> TextDelta:
        self._phases.take_token()
        self.num_tokens += 1
        self._metrics.generation_tokens.inc()
        text = self._stops.push(self._lead.push(self._detokenizer.push(token.token_id)))
        if not self._request.sampling.HasField("logprobs"):
            return TextDelta(self.index, text)
        top = tuple((self._tokenizer.decode_token(each.token_id), each.logprob) for each in token.top)
        name = self._tokenizer.decode_token(token.token_id)
        return TextDelta(self.index, text, (TokenLogprob(name, token.logprob, top),))

    def _flush(self) -> str:
        """What still waits to be sent, now that no token follows."""
        rest = self._lead.push(self._detokenizer.flush()) + self._lead.flush()
        return self._stops.push(rest) + self._stops.flush()

    def _complete(self, complete: pb.Complete) -> str:
        """The finish reason. Raises WorkerUnavailable for an abort that was not requested here."""
        if complete.finish_reason not in FINISH_REASONS:
            raise WorkerUnavailable("The model worker ended the request.")
        self.usage = complete.usage
        self.num_tokens = max(self.num_tokens, complete.usage.completion_tokens)
        return FINISH_REASONS[complete.finish_reason]

    async def _end_early(self, stream: AsyncGenerator[pb.GenerateResponse, None]) -> None:
        """A stop string was seen: end the request in the worker, and wait a little for its account."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._worker.abort(self._request.request_id)
                async for event in stream:
                    if event.HasField("complete"):
                        self.usage = event.complete.usage
                        return
        except (TimeoutError, ServiceError) as error:
            # the text is complete all the same; only the account is missing
            log.warning("no account of request %s: %s", self._request.request_id, error or "timeout")


async def merge(streams: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """Events of all streams as they come, each stream's in order. The first error ends all of them, and so does
    closing the merged stream. A reader that lags stops the streams once `MAX_PENDING_EVENTS` wait.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as alone:
            async for event in alone:
                yield event
        return
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(MAX_PENDING_EVENTS)

    async def pump(stream: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put(event)
        except Exception as error:
            # raised again by the reader
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_open = len(streams)
        while num_open:
            match await queue.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case other:
                    yield other
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def total_usage(choices: Sequence[Choice], num_prompt_tokens: Sequence[int], started_at: float) -> Usage:
    """Usage of all choices; each prompt counts once, however many choices it has. Choices lie prompt by prompt."""
    first_token_at = min((choice.first_token_at or started_at for choice in choices), default=started_at)
    num_per_prompt = len(choices) // len(num_prompt_tokens)
    return Usage(
        prompt_tokens=sum(num_prompt_tokens),
        completion_tokens=sum(choice.num_tokens for choice in choices),
        ttft_ms=(first_token_at - started_at) * 1000,
        worker=_combine([choices[at : at + num_per_prompt] for at in range(0, len(choices), num_per_prompt)]),
    )


def _combine(prompts: Sequence[Sequence[Choice]]) -> pb.Usage | None:
    """The worker's account of all choices: sums, means and maxima, as docs/api.md says."""
    accounts = [[choice.usage for choice in choices if choice.usage is not None] for choices in prompts]
    usages = [usage for of_prompt in accounts for usage in of_prompt]
    if not usages:
        return None
    total = pb.Usage(policy=usages[0].policy)
    total.cached_tokens = sum(
        min((each.cached_tokens for each in of_prompt), default=0) for of_prompt in accounts
    )
    for name in ("offloaded_tokens", "bytes_moved"):
        setattr(total, name, sum(getattr(usage, name) for usage in usages))
    for name in ("attended_tokens", "window_tokens", "hit_rate"):
        setattr(total, name, sum(getattr(usage, name) for usage in usages) / len(usages))
    for name in ("budget_tokens", "context_tokens", "queue_ms", "prefill_ms", "index_wait_ms", "decode_ms"):
        setattr(total, name, max(getattr(usage, name) for usage in usages))
    return total
