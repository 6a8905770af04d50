"""A choice as chat writes it, and as completion does."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from gateway.exchange import ReasoningDelta, TokenLogprob, ToolCallDelta
from gateway.rest.answer import ChoiceText, json_float


class ChatFormat:
    """A message; in a stream deltas of one, the role first."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, has_logprobs: bool, num_of_prompt: int | None) -> None:
        """num_of_prompt: alternatives to tell of each of the prompt's tokens; None: nothing of them."""
        self._has_logprobs = has_logprobs
        self._num_of_prompt = num_of_prompt

    def beside(self, choices: Sequence[ChoiceText]) -> dict[str, Any]:
        """All choices have one prompt."""
        if self._num_of_prompt is None:
            return {}
        return {"prompt_logprobs": _prompt_logprobs(choices[0].prompt_logprobs, self._num_of_prompt)}

    def whole(self, choice: ChoiceText) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in choice.calls]
        return {
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs) if self._has_logprobs else None,
        }

    def begin(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"delta": {"content": text}, "logprobs": chat_logprobs(logprobs) if logprobs else None}

    def part(self, event: ReasoningDelta | ToolCallDelta) -> dict[str, Any]:
        match event:
            case ReasoningDelta(text=text):
                delta: dict[str, Any] = {"reasoning_content": text}
            case ToolCallDelta(place=place, id=call_id, name=name, arguments=arguments):
                told = _call(call_id, name, arguments) if call_id else {"function": {"arguments": arguments}}
                delta = {"tool_calls": [{"index": place, **told}]}
        return {"delta": delta, "logprobs": None}

    def end(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}


class CompletionFormat:
    """Text, and where in it each token begins."""

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, num_logprobs: int | None, num_of_prompt: int | None) -> None:
        """Alternatives to tell of each token, and of each of the prompt's; None: nothing of them."""
        self._num_logprobs = num_logprobs
        self._num_of_prompt = num_of_prompt
        # of the stream so far, per choice
        self._offsets: dict[int, _Offsets] = {}

    def whole(self, choice: ChoiceText) -> dict[str, Any]:
        told: dict[str, Any] = {"text": choice.text, "logprobs": None}
        if self._num_logprobs is not None:
            offsets = _Offsets(choice.text, choice.logprobs)
            told["logprobs"] = _completion_logprobs(choice.logprobs, offsets, self._num_logprobs)
        if self._num_of_prompt is not None:
            told["prompt_logprobs"] = _prompt_logprobs(choice.prompt_logprobs, self._num_of_prompt)
        return told

    def beside(self, choices: Sequence[ChoiceText]) -> dict[str, Any]:
        return {}

    def begin(self) -> None:
        return None

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        if index not in self._offsets:
            self._offsets[index] = _Offsets(text, logprobs)
        offsets = self._offsets[index]
        told = _completion_logprobs(logprobs, offsets, self._num_logprobs or 0) if logprobs else None
        return {"text": text, "logprobs": told}

    def part(self, event: ReasoningDelta | ToolCallDelta) -> dict[str, Any]:
        raise TypeError("a completion is all text")

    def end(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """With the best alternatives to each, and its bytes."""
    content = [
        {
            **_chat_logprob(token),
            "top_logprobs": [_chat_logprob(each) for each in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": json_float(token.logprob), "bytes": list(token.bytes)}


def _prompt_logprobs(tokens: Sequence[TokenLogprob], num_top: int) -> list[dict[str, Any] | None]:
    """As vLLM has them: by their ids each token and the best alternatives to it; of the first nothing."""
    return [
        None,
        *(
            {str(token.token_id): _ranked(token, token.rank)}
            | {str(each.token_id): _ranked(each, rank) for rank, each in enumerate(token.top[:num_top], 1)}
            for token in tokens
        ),
    ]


def _ranked(token: TokenLogprob, rank: int | None) -> dict[str, Any]:
    return {"logprob": json_float(token.logprob), "rank": rank, "decoded_token": token.token}


class _Offsets:
    """Where in a choice's text its tokens begin; of one that begins within a character, where that does."""

    def __init__(self, text: str, first: Sequence[TokenLogprob]) -> None:
        """What the text begins with, and its first tokens."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
        # an echoed prompt's begin token, which its text leaves out, lies before it
        if first and first[0].logprob is None and not _begins(text, first[0].bytes):
            self._num_chars = -len(first[0].token)

    def take(self, token: TokenLogprob) -> int:
        """Of the next token."""
        offset = max(self._num_chars, 0)
        self._num_chars += len(self._decoder.decode(token.bytes))
        return offset


def _begins(text: str, beginning: bytes) -> bool:
    # a character has a byte at least
    return text[: len(beginning)].encode().startswith(beginning)


def _completion_logprobs(tokens: Sequence[TokenLogprob], offsets: _Offsets, num_top: int) -> dict[str, Any]:
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [json_float(token.logprob) for token in tokens],
        # the token itself is there even where it is none of the best; a prompt's first is likely after nothing
        "top_logprobs": [
            None
            if token.logprob is None
            else {each.token: json_float(each.logprob) for each in (*token.top[:num_top], token)}
            for token in tokens
        ],
        "text_offset": [offsets.take(token) for token in tokens],
    }
