"""Completion answers: one object, or chunks."""

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


def completion_json(generation: Generation, answer: Answer, has_logprobs: bool) -> dict[str, Any]:
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": _logprobs(choice.logprobs, 0) if has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        for choice in answer.choices
    ]
    return {**_head(generation), "choices": choices, "usage": usage_json(answer.usage)}


class CompletionChunks:
    """Each choice: text and one finish; the usage last when it was asked for."""

    def __init__(self, generation: Generation, include_usage: bool) -> None:
        self._head = _head(generation)
        self._include_usage = include_usage
        # characters of the tokens reported so far, per choice
        self._offsets: dict[int, int] = {}

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case TextDelta(index=index, text=text, logprobs=logprobs) if text or logprobs:
                yield self._chunk(index, text, None, logprobs)
            case ChoiceFinished(index=index, finish_reason=reason):
                yield self._chunk(index, "", reason)
            case Completed(usage=usage) if self._include_usage:
                yield {**self._head, "choices": [], "usage": usage_json(usage)}
            case TextDelta() | Completed() | Prefilling():
                pass

    def _chunk(
        self, index: int, text: str, finish_reason: str | None, logprobs: Sequence[TokenLogprob] = ()
    ) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(token.token) for token in logprobs)
        choice = {
            "index": index,
            "text": text,
            "logprobs": _logprobs(logprobs, offset) if logprobs else None,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self._include_usage else {}
        return {**self._head, "choices": [choice], **usage}


def _head(generation: Generation) -> dict[str, Any]:
    return {
        "id": f"cmpl-{generation.request_id}",
        "object": "text_completion",
        "created": generation.created,
        "model": generation.model,
    }


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [json_float(token.logprob) for token in tokens],
        "top_logprobs": [{text: json_float(logprob) for text, logprob in token.top} for token in tokens],
        "text_offset": offsets,
    }
