"""One choice of a request: from the worker's tokens to text with an end, behind its prompt where that was asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace

from gateway.answer_text import AnswerLead, StopMatcher
from gateway.errors import GenerationFailed, RequestTimeout, ServiceError, WorkerUnavailable
from gateway.exchange import ChoiceFinished, Echo, Event, TextDelta, TokenLogprob
from gateway.heavy_work import CallerWork
from gateway.metrics import Metrics
from gateway.progress import Phases, PrefillProgress
from gateway.token_texts import Decode, Detokenizer, TokenTexts, read_logprobs
from gateway.tokenizer import Tokenizer
from gateway.worker_client import TokenSource
from gpu_worker.v1 import gpu_worker_pb2 as pb

# about what looking up a token costs, in characters of other work
SCORE_CHARS = 32


class PromptEcho:
    """Says the prompt's text once, before anything else, and how likely its tokens are where the worker tells it."""

    def __init__(
        self,
        index: int,
        echo: Echo | None,
        request: pb.GenerateRequest,
        texts: TokenTexts,
        work: CallerWork,
    ) -> None:
        """index: of the choice. echo: None for none."""
        self._index = index
        self._left = self._echo = echo
        self._request = request
        self._texts = texts
        self._work = work
        self.is_all = echo is not None and echo.is_all

    def begin(self) -> Iterator[TextDelta]:
        """The text, with the first token, which is likely after nothing; once."""
        echo, self._left = self._left, None
        if echo is None:
            return
        first: tuple[TokenLogprob, ...] = ()
        if self._request.sampling.HasField("prompt_logprobs"):
            token_id = self._request.prompt_token_ids[0]
            first = (TokenLogprob(token_id, *self._texts.told(token_id), None),)
        yield TextDelta(self._index, echo.text, first)

    async def take(self, prompt: pb.PromptTokens) -> AsyncIterator[TextDelta]:
        """The next of its tokens, a thousand of them, within the text or beside it: read beside the event loop."""
        for begun in self.begin():
            yield begun
        size = SCORE_CHARS * sum(1 + len(token.top) for token in prompt.tokens)
        told = await self._work.answer(size, read_logprobs, self._texts, prompt.tokens)
        yield TextDelta(self._index, "", () if self._echo is None else told, prompt_logprobs=told)


ABORT_TIMEOUT_S = 2.0
FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}

log = logging.getLogger(__name__)


class Choice:
    """Iterate `events` once, or again where they failed before the first token. `num_tokens`, `usage` and
    `first_token_at` are filled on the way.

    `deadline` is the request's, in monotonic seconds; `progress` is the request's, of all its choices; `work` reads a
    prompt's tokens in a thread; `lead` is white space that the text may begin with and that is left out (see
    AnswerLead); with `is_verbatim` all of the text stays, as its grammar has it; `echo` is what comes before it;
    `decode` makes texts of tokens, else the tokenizer's does. `usage` stays None when a stop string ended the choice
    and the worker's account did not arrive in time.
    """

    def __init__(
        self,
        index: int,
        request: pb.GenerateRequest,
        deadline: float,
        stops: StopMatcher,
        lead: str,
        tokenizer: Tokenizer,
        worker: TokenSource,
        metrics: Metrics,
        progress: PrefillProgress,
        work: CallerWork,
        echo: Echo | None = None,
        decode: Decode | None = None,
        is_verbatim: bool = False,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.usage: pb.Usage | None = None
        self._request = request
        self._deadline = deadline
        self._stops = stops
        self._lead = AnswerLead("" if is_verbatim else lead)
        self._detokenizer = Detokenizer(
            decode or tokenizer.decode,
            request.prompt_token_ids,
            tokenizer.tokens.anchor if is_verbatim else (),
        )
        self._tokenizer = tokenizer
        self._worker = worker
        self._metrics = metrics
        self._phases = Phases(metrics)
        self._progress = progress
        # that no delta has told
        self._token_ids: list[int] = []
        self._is_begun = False
        self._echo = PromptEcho(index, echo, request, tokenizer.tokens, work)

    @property
    def max_tokens(self) -> int:
        """The longest that its answer may be."""
        return self._request.sampling.max_tokens

    @property
    def first_token_at(self) -> float | None:
        return self._phases.first_token_at

    async def events(self) -> AsyncGenerator[Event, None]:
        """Text as it becomes certain, then one ChoiceFinished. Closing this frees the worker's room."""
        self._phases.enter_queue()
        finish_reason: str | None = None
        timeout_s = self._deadline - time.monotonic()
        if timeout_s <= 0:
            raise RequestTimeout(timeout_s)
        async with aclosing(self._worker.generate(self._request, timeout_s)) as stream:
            async for event in stream:
                match event.WhichOneof("event"):
                    case "progress":
                        self._phases.begin_prefill()
                        computed, cached = event.progress.computed_tokens, event.progress.cached_tokens
                        if (told := self._progress.take(self.index, computed, cached)) is not None:
                            yield told
                    case "prompt":
                        async for echoed in self._echo.take(event.prompt):
                            yield self._told(echoed)
                    case "token" if self._echo.is_all:
                        self._phases.take_token()
                    case "token":
                        for echoed in self._echo.begin():
                            yield self._told(echoed)
                        delta = self._take(event.token)
                        if delta.text or delta.logprobs or self.num_tokens == 1:
                            yield self._told(delta)
                        if self._stops.found is not None:
                            await self._end_early(stream)
                            break
                    case "complete":
                        for echoed in self._echo.begin():
                            yield self._told(echoed)
                        finish_reason = self._complete(event.complete)
                        if (text := self._flush()) or self._token_ids or not self._is_begun:
                            yield self._told(TextDelta(self.index, text))
                        break
        if self._stops.found is not None:
            finish_reason = "stop"
        if finish_reason is None:
            raise GenerationFailed("The model worker ended the stream too early.")
        self._phases.end()
        yield ChoiceFinished(self.index, finish_reason, self._stops.found)

    def _take(self, token: pb.Token) -> TextDelta:
        self._phases.take_token()
        self.num_tokens += 1
        self._token_ids.append(token.token_id)
        self._metrics.generation_tokens.inc()
        text = self._stops.push(self._lead.push(self._detokenizer.push(token.token_id)))
        if not self._request.sampling.HasField("logprobs"):
            return TextDelta(self.index, text)
        return TextDelta(self.index, text, read_logprobs(self._tokenizer.tokens, [token]))

    def _told(self, delta: TextDelta) -> TextDelta:
        """With the tokens that came, and at first with the prompt's."""
        prompt = () if self._is_begun else self._request.prompt_token_ids
        token_ids, self._token_ids, self._is_begun = tuple(self._token_ids), [], True
        return replace(delta, token_ids=token_ids, prompt_token_ids=prompt)

    def _flush(self) -> str:
        """Yield the text that was held back, now that no token follows."""
        rest = self._lead.push(self._detokenizer.flush()) + self._lead.flush()
        return self._stops.push(rest) + self._stops.flush()

    def _complete(self, complete: pb.Complete) -> str:
        """The finish reason. Raises WorkerUnavailable for an abort that was not requested here."""
        if complete.finish_reason not in FINISH_REASONS:
            raise WorkerUnavailable("The model worker ended the request.")
        self.usage = complete.usage
        if self._echo.is_all:
            # the worker makes one at least
            self.usage.context_tokens = len(self._request.prompt_token_ids)
            return "length"
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
                        # what the worker made meanwhile is no part of the answer
                        self.usage.context_tokens = len(self._request.prompt_token_ids) + self.num_tokens
                        return
        except (TimeoutError, ServiceError) as error:
            # the text is complete all the same; only the account is missing
            log.warning("no account of request %s: %s", self._request.request_id, error or "timeout")
