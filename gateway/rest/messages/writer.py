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
from gateway.rest.answer import Answer, usage_answer
from gateway.rest.messages.errors import INTERNAL, message_error
from gateway.rest.messages.schemas import MessageAnswer
from gateway.rest.sse import named_frame
from gateway.tool_calls.arguments import read_arguments


class MessageWriter:
    """A `ReplyWriter` of one request."""

    end = b""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._is_begun = False
        # what the block that is open holds: thinking, text, or a call by its place; None: none is
        self._open: str | int | None = None
        self._num_blocks = 0
        self._reason: dict[str, Any] = {}

    def whole(self, answer: Answer) -> MessageAnswer:
        choice = answer.choices[0]
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({"type": "thinking", "thinking": "".join(choice.reasoning), "signature": ""})
        if choice.text:
            content.append({"type": "text", "text": choice.text})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": read_arguments(call.arguments)}
            for call in choice.calls
        ]
        usage = _usage(answer.usage) if answer.usage is not None else _prompt_usage(0, 0)
        reason = _reason(choice.finish_reason, choice.stop)
        return MessageAnswer(**{**self._message(usage), "content": content, **reason})

    def unfinished(self, answer: Answer, error: ServiceError) -> Response:
        raise error

    async def frames(self, event: Event) -> bytes:
        return b"".join(named_frame(each) for each in self._events(event))

    def failed(self, error: ServiceError | None) -> bytes:
        return named_frame(INTERNAL if error is None else message_error(error))

    def _events(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case Prefilling(prompt_tokens=prompt, cached_tokens=cached):
                return self._begin(_prompt_usage(prompt, cached))
            case ReasoningDelta(text=text) if text:
                begun = self._begin_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return [*begun, self._block("delta", delta={"type": "thinking_delta", "thinking": text})]
            case TextDelta(text=text) if text:
                begun = self._begin_block("text", {"type": "text", "text": ""})
                return [*begun, self._block("delta", delta={"type": "text_delta", "text": text})]
            case ToolCallDelta(place=place, arguments=arguments):
                call: dict[str, Any] = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                begun = self._begin_block(place, call)
                delta = {"type": "input_json_delta", "partial_json": arguments}
                return [*begun, *([self._block("delta", delta=delta)] if arguments else [])]
            case ChoiceFinished(finish_reason=reason, stop=stop):
                self._reason = _reason(reason, stop)
                return [*self._begin(_prompt_usage(0, 0)), *self._end_block()]
            case Completed(usage=usage):
                ended = {"type": "message_delta", "delta": self._reason, "usage": _usage(usage)}
                return [ended, {"type": "message_stop"}]
            case TextDelta() | ReasoningDelta():
                return []

    def _begin(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        if self._is_begun:
            return []
        self._is_begun = True
        return [{"type": "message_start", "message": self._message(usage)}]

    def _begin_block(self, what: str | int, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Nothing where it is open already."""
        if self._open == what:
            return []
        ended = self._end_block()
        self._open = what
        begun = self._block("start", content_block=block)
        return [*self._begin(_prompt_usage(0, 0)), *ended, begun]

    def _end_block(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        ended = self._block("stop")
        self._open, self._num_blocks = None, self._num_blocks + 1
        return [ended]

    def _block(self, what: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{what}", "index": self._num_blocks, **fields}

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


REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _reason(finish_reason: str | None, stop: str | None) -> dict[str, Any]:
    ended = "stop_sequence" if stop is not None else REASONS.get(finish_reason or "")
    return {"stop_reason": ended, "stop_sequence": stop}


def _prompt_usage(prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Before anything is generated."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "output_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    ours = usage_answer(usage).carrel
    carrel = {} if ours is None else {"carrel": ours.model_dump()}
    told = _prompt_usage(usage.prompt_tokens, usage.cached_tokens)
    return {**told, "output_tokens": usage.completion_tokens, **carrel}
