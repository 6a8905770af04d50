"""An answer as Anthropic writes it: one message, or the events of a stream."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from gateway.errors import ServiceError
from gateway.exchange import (
    ChoiceFinished,
    Completed,
    Event,
    Generation,
    Prefilling,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from gateway.rest.answer import Answer, usage_json
from gateway.rest.messages.errors import INTERNAL, message_error
from gateway.rest.sse import named_frame


class MessageWriter:
    """A `ReplyWriter` of one request."""

    end = b""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._is_begun = False
        self._has_text = False
        self._reason: dict[str, Any] = {}

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice = answer.choices[0]
        content = [{"type": "text", "text": choice.text}] if choice.text else []
        usage = _usage(answer.usage) if answer.usage is not None else _prompt_usage(0, 0)
        return {**self._message(usage), "content": content, **_reason(choice.finish_reason, choice.stop)}

    def unfinished(self, answer: Answer, error: ServiceError) -> Response:
        raise error

    def frames(self, event: Event) -> bytes:
        return b"".join(named_frame(each) for each in self._events(event))

    def failed(self, error: ServiceError | None) -> bytes:
        return named_frame(INTERNAL if error is None else message_error(error))

    def _events(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case Prefilling(prompt_tokens=prompt, cached_tokens=cached):
                return self._begin(_prompt_usage(prompt, cached))
            case TextDelta(text=text) if text:
                return [
                    *self._begin(_prompt_usage(0, 0)),
                    *self._begin_block(),
                    _block("delta", delta={"type": "text_delta", "text": text}),
                ]
            case ChoiceFinished(finish_reason=reason, stop=stop):
                self._reason = _reason(reason, stop)
                return [*self._begin(_prompt_usage(0, 0)), *([_block("stop")] if self._has_text else [])]
            case Completed(usage=usage):
                delta = {"type": "message_delta", "delta": self._reason, "usage": _usage(usage)}
                return [delta, {"type": "message_stop"}]
            case TextDelta() | ReasoningDelta() | ToolCallDelta():
                # calls and reasoning come to chats that ask for them: none does here
                return []

    def _begin(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        if self._is_begun:
            return []
        self._is_begun = True
        return [{"type": "message_start", "message": self._message(usage)}]

    def _begin_block(self) -> list[dict[str, Any]]:
        if self._has_text:
            return []
        self._has_text = True
        return [_block("start", content_block={"type": "text", "text": ""})]

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._generation.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _block(what: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"content_block_{what}", "index": 0, **fields}


def _reason(finish_reason: str | None, stop: str | None) -> dict[str, Any]:
    ended = "end_turn" if stop is None else "stop_sequence"
    return {"stop_reason": ended if finish_reason == "stop" else "max_tokens", "stop_sequence": stop}


def _prompt_usage(prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Before anything is generated."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "output_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    ours = usage_json(usage)
    carrel = {"carrel": ours["carrel"]} if "carrel" in ours else {}
    told = _prompt_usage(usage.prompt_tokens, usage.cached_tokens)
    return {**told, "output_tokens": usage.completion_tokens, **carrel}
