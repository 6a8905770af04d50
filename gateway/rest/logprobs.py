"""Log probabilities of tokens, as chats, completions and vLLM's clients have them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from gateway.exchange import TokenLogprob
from gateway.rest.answers import ChatLogprobs, ChatToken, CompletionLogprobs, PromptToken, TopToken


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    """With the best alternatives to each, and its bytes."""
    content = [
        ChatToken(
            **_chat_logprob(token), top_logprobs=[TopToken(**_chat_logprob(each)) for each in token.top]
        )
        for token in tokens
    ]
    return ChatLogprobs(content=content, refusal=None)


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": json_float(token.logprob), "bytes": list(token.bytes)}


def prompt_logprobs(tokens: Sequence[TokenLogprob], num_top: int) -> list[dict[str, PromptToken] | None]:
    """As vLLM has them: by their ids each token and the best alternatives to it; of the first nothing."""
    return [
        None,
        *(
            {str(token.token_id): _ranked(token, token.rank)}
            | {str(each.token_id): _ranked(each, rank) for rank, each in enumerate(token.top[:num_top], 1)}
            for token in tokens
        ),
    ]


def _ranked(token: TokenLogprob, rank: int | None) -> PromptToken:
    return PromptToken(logprob=json_float(token.logprob), rank=rank, decoded_token=token.token)


def json_float(value: float | None) -> Any:
    """JSON has no infinity; OpenAI writes -9999 for an impossible token. None stays None."""
    return None if value is None else max(value, -9999.0)


class Offsets:
    """Where in a choice's text its tokens begin; of one that begins within a character, where that does."""

    def __init__(self, text: str, first: Sequence[TokenLogprob]) -> None:
        """text: its beginning. first: its first tokens."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
        # an echoed prompt's begin token, which its text leaves out, lies before it
        if first and first[0].logprob is None and not _begins(text, first[0].bytes):
            self._num_chars = -len(first[0].token)

    def take(self, token: TokenLogprob) -> int:
        """Return the offset of the next token."""
        offset = max(self._num_chars, 0)
        self._num_chars += len(self._decoder.decode(token.bytes))
        return offset


def _begins(text: str, beginning: bytes) -> bool:
    # a character has a byte at least
    return text[: len(beginning)].encode().startswith(beginning)


def completion_logprobs(tokens: Sequence[TokenLogprob], offsets: Offsets, num_top: int) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[token.token for token in tokens],
        token_logprobs=[json_float(token.logprob) for token in tokens],
        # the token itself is there even where it is none of the best; a prompt's first is likely after nothing
        top_logprobs=[
            None
            if token.logprob is None
            else {each.token: json_float(each.logprob) for each in (*token.top[:num_top], token)}
            for token in tokens
        ],
        text_offset=[offsets.take(token) for token in tokens],
    )
