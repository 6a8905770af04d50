"""The prompt at the start of a choice, and how likely its tokens are, where that was asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from gateway.exchange import Echo, TextDelta, TokenLogprob
from gateway.heavy_work import CallerWork
from gateway.token_texts import TokenTexts, read_logprobs
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
