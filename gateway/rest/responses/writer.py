"""An answer as OpenAI's responses have it: one object, or the events of a stream."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from starlette.responses import Response

from gateway.errors import ServiceError
from gateway.exchange import (
    ChoiceFinished,
    Completed,
    Event,
    Message,
    Prefilling,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from gateway.rest.answer import Answer, usage_answer
from gateway.rest.errors import error_body, internal_error_body
from gateway.rest.responses.items import CallItem, Item, MessageItem, ReasoningItem
from gateway.rest.responses.schemas import ResponseAnswer
from gateway.rest.sse import named_frame


class ResponseWriter:
    """A `ReplyWriter` of one request."""

    end = b""

    def __init__(self, head: dict[str, Any], done: Callable[[dict[str, Any], Message], None]) -> None:
        """head: what of the object is known before. done: is given the whole object, and the answer as a message,
        before the client is."""
        self._head = head
        self._done = done
        self._numbers = count()
        self._is_begun = False
        self._items: list[Item] = []
        # of the item that grows, the last; and a call's place
        self._open: str | int | None = None
        self._finish_reason: str | None = None
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[CallItem] = []

    def whole(self, answer: Answer) -> ResponseAnswer:
        choice = answer.choices[0]
        if choice.reasoning:
            self._events(ReasoningDelta(0, "".join(choice.reasoning)))
        if choice.text or choice.logprobs:
            self._events(TextDelta(0, choice.text, tuple(choice.logprobs)))
        for place, call in enumerate(choice.calls):
            self._events(ToolCallDelta(0, place, call.id, call.name, call.arguments))
        self._events(ChoiceFinished(0, choice.finish_reason or "length"))
        return ResponseAnswer(**self._finish(answer.usage))

    def unfinished(self, answer: Answer, error: ServiceError) -> Response:
        raise error

    async def frames(self, event: Event) -> bytes:
        return b"".join(map(self._frame, self._events(event)))

    def failed(self, error: ServiceError | None) -> bytes:
        told = (internal_error_body() if error is None else error_body(error)).error
        return self._frame(
            {"type": "error", "code": str(told.code), "message": told.message, "param": told.param}
        )

    def _frame(self, event: dict[str, Any]) -> bytes:
        return named_frame({**event, "sequence_number": next(self._numbers)})

    def _events(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case Prefilling():
                return self._begin()
            case ReasoningDelta(text=text):
                self._thoughts.append(text)
                thought, begun = self._item("thought", ReasoningItem)
                return [*begun, thought.add(text)]
            case TextDelta(text=text, logprobs=logprobs) if text or logprobs:
                self._text.append(text)
                message, begun = self._item("text", MessageItem)
                return [*begun, message.add(text, logprobs)]
            case ToolCallDelta(place=place, arguments=arguments):
                call, begun = self._item(
                    place, lambda item_id, at: CallItem(item_id, at, event.id, event.name)
                )
                if call not in self._calls:
                    self._calls.append(call)
                return [*begun, *([call.add(arguments)] if arguments else [])]
            case ChoiceFinished(finish_reason=reason):
                self._finish_reason = reason
                begun = [] if self._items else self._item("text", MessageItem)[1]
                return [*self._begin(), *begun, *self._end_item()]
            case Completed(usage=usage):
                response = self._finish(usage)
                return [{"type": f"response.{response['status']}", "response": response}]
            case TextDelta():
                return self._begin()

    def _begin(self) -> list[dict[str, Any]]:
        if self._is_begun:
            return []
        self._is_begun = True
        response = self._object("in_progress", [], None)
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _item(self, what: str | int, make: Callable[[str, int], Any]) -> tuple[Any, list[dict[str, Any]]]:
        """The item that grows, a new one where another did; and the events of that."""
        if self._open == what:
            return self._items[-1], []
        ended = self._end_item()
        place = len(self._items)
        item = make(f"item_{place}_{self._head['id'].removeprefix('resp_')}", place)
        self._items.append(item)
        self._open = what
        added = {
            "type": "response.output_item.added",
            "output_index": place,
            "item": item.whole("in_progress"),
        }
        return item, [*self._begin(), *ended, added, *item.begin()]

    def _end_item(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        item, self._open, status = self._items[-1], None, self._status
        done = {
            "type": "response.output_item.done",
            "output_index": item.place,
            "item": item.whole(status),
        }
        return [*item.end(status), done]

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _finish(self, usage: Usage | None) -> dict[str, Any]:
        last = len(self._items) - 1
        output = [item.whole(self._status if item.place == last else "completed") for item in self._items]
        response = self._object(self._status, output, usage)
        calls = tuple(item.call for item in self._calls)
        thoughts = "".join(self._thoughts) or None
        self._done(response, Message("assistant", "".join(self._text), calls, reasoning=thoughts))
        return response

    def _object(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "incomplete_details": details,
            "output": output,
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    ours = usage_answer(usage).carrel
    carrel = {} if ours is None else {"carrel": ours.model_dump()}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
        **carrel,
    }
