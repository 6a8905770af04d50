"""One choice of a request: from the worker's tokens to text with an end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

from gateway.answer_lead import AnswerLead
from gateway.detokenizer import Detokenizer
from gateway.errors import GenerationFailed, ServiceError, WorkerUnavailable
from gateway.metrics import Metrics
from gateway.records import (
    ChoiceFinished,
    Event,
    FinishReason,
    Prefilling,
    TextDelta,
    TokenLogprob,
    WorkerComplete,
    WorkerEvent,
    WorkerProgress,
    WorkerRequest,
    WorkerToken,
    WorkerUsage,
)
from gateway.stop import StopMatcher
from gateway.tokenizer import Tokenizer
from gateway.worker_client import WorkerClient

ABORT_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class Choice:
    """Iterate `events` once. `num_tokens`, `usage` and `first_token_at` are filled on the way.

    `lead` is white space that the text may begin with and that is left out (see AnswerLead).

    `usage` stays None when a stop string ended the choice and the worker's account did not arrive in time.
    """

    def __init__(
        self,
        index: int,
        request: WorkerRequest,
        stops: tuple[str, ...],
        lead: str,
        tokenizer: Tokenizer,
        worker: WorkerClient,
        metrics: Metrics,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.usage: WorkerUsage | None = None
        self.first_token_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self._request = request
        self._stops = StopMatcher(stops)
        self._lead = AnswerLead(lead)
        self._detokenizer = Detokenizer(tokenizer.decode, request.prompt_token_ids)
        self._tokenizer = tokenizer
        self._worker = worker
        self._metrics = metrics
        self._last_token_at = 0.0

    async def events(self) -> AsyncGenerator[Event, None]:
        """Text as it becomes certain, then one ChoiceFinished. Closing this frees the worker's room."""
        stream = self._worker.generate(self._request)
        try:
            async for event in stream:
                match event:
                    case WorkerProgress(prefilled_tokens=prefilled):
                        yield Prefilling(self.index, prefilled)
                    case WorkerToken():
                        delta = self._take(event)
                        if delta.text or delta.logprobs or self.num_tokens == 1:
                            yield delta
                        if self._stops.has_stopped:
                            await self._end_early(stream)
                            break
                    case WorkerComplete():
                        self._complete(event)
                        if text := self._flush():
                            yield TextDelta(self.index, text)
                        break
        finally:
            await stream.aclose()
        if self.finish_reason is None:
            raise GenerationFailed("The model worker ended the stream too early.")
        if self._stops.has_stopped:
            self.finish_reason = FinishReason.STOP
        yield ChoiceFinished(self.index, self.finish_reason)

    def _take(self, token: WorkerToken) -> TextDelta:
        now = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self._metrics.itl.observe(now - self._last_token_at)
        self._last_token_at = now
        self.num_tokens += 1
        self._metrics.generation_tokens.inc()
        text = self._stops.push(self._lead.push(self._detokenizer.push(token.token_id)))
        if self._request.sampling.logprobs is None:
            return TextDelta(self.index, text)
        top = tuple((self._tokenizer.decode_token(token_id), logprob) for token_id, logprob in token.top)
        name = self._tokenizer.decode_token(token.token_id)
        return TextDelta(self.index, text, (TokenLogprob(name, token.logprob, top),))

    def _flush(self) -> str:
        """What still waits to be sent, now that no token follows."""
        rest = self._lead.push(self._detokenizer.flush()) + self._lead.flush()
        return self._stops.push(rest) + self._stops.flush()

    def _complete(self, complete: WorkerComplete) -> None:
        if complete.finish_reason is FinishReason.ABORT:
            raise WorkerUnavailable("The model worker ended the request.")
        self.usage = complete.usage
        self.num_tokens = max(self.num_tokens, complete.usage.completion_tokens)
        self.finish_reason = complete.finish_reason

    async def _end_early(self, stream: AsyncGenerator[WorkerEvent, None]) -> None:
        """A stop string was seen: end the request in the worker, and wait a little for its account."""
        self.finish_reason = FinishReason.STOP
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._worker.abort(self._request.request_id)
                async for event in stream:
                    match event:
                        case WorkerComplete(usage=usage):
                            self.usage = usage
                            return
        except (TimeoutError, ServiceError) as error:
            # the text is complete all the same; only the account is missing
            log.warning("no account of request %s: %s", self._request.request_id, error or "timeout")
