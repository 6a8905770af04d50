"""Chat answers: one object, or chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gateway.records import (
    ChoiceFinished,
    Completed,
    Event,
    Generation,
    Prefilling,
    TextDelta,
    TokenLogprob,
)
from gateway.rest.answer import Answer, json_float, usage_json


def chat_json(generation: Generation, answer: Answer, has_logprobs: bool) -> dict[str, Any]:
    choices = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _logprobs(choice.logprobs) if has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        for choice in answer.choices
    ]
    return {**_head(generation, "chat.completion"), "choices": choices, "usage": usage_json(answer.usage)}


class ChatChunks:
    """Each choice: a role, text, and one finish; the usage last when it was asked for."""

    def __init__(self, generation: Generation, include_usage: bool) -> None:
        self._head = _head(generation, "chat.completion.chunk")
        self._include_usage = include_usage
        self._greeted: set[int] = set()

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case TextDelta(index=index, text=text, logprobs=logprobs):
                yield from self._greet(index)
                if text or logprobs:
                    yield self._chunk(index, {"content": text}, None, logprobs)
            case ChoiceFinished(index=index, finish_reason=reason):
                yield from self._greet(index)
                yield self._chunk(index, {}, reason)
            case Completed(usage=usage) if self._include_usage:
                yield {**self._head, "choices": [], "usage": usage_json(usage)}
            case Completed() | Prefilling():
                pass

    def _greet(self, index: int) -> Iterator[dict[str, Any]]:
        if index not in self._greeted:
            self._greeted.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""}, None)

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self._include_usage else {}
        return {**self._head, "choices": [choice], **usage}


def _head(generation: Generation, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{generation.request_id}",
        "object": kind,
        "created": generation.created,
        "model": generation.model,
    }


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        {
            **_logprob(token.token, token.logprob),
            "top_logprobs": [_logprob(text, logprob) for text, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _logprob(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": json_float(logprob), "bytes": list(token.encode())}
