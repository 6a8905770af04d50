"""Items of a response's output, as they grow and as they are: what is said, what is thought, what is called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from gateway.exchange import TokenLogprob, ToolCall
from gateway.rest.formats import chat_logprobs

Event = dict[str, Any]


class Item(Protocol):
    """place: among the output's items."""

    id: str
    place: int

    def whole(self, status: str) -> dict[str, Any]:
        """As it is now; `status` is in_progress, completed or incomplete."""

    def begin(self) -> list[Event]: ...

    def end(self, status: str) -> list[Event]: ...


class MessageItem:
    """Text, with its log probabilities where they were asked for."""

    def __init__(self, item_id: str, place: int) -> None:
        self.id, self.place = item_id, place
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, text: str, logprobs: Iterable[TokenLogprob] = ()) -> Event:
        """The event of this piece."""
        told = [each.model_dump() for each in chat_logprobs([*logprobs]).content]
        self._pieces.append(text)
        self._logprobs += told
        return self._event("output_text.delta", delta=text, logprobs=told)

    def whole(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part()]
        return {
            "type": "message",
            "id": self.id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def begin(self) -> list[Event]:
        return [self._event("content_part.added", part=self._part())]

    def end(self, status: str) -> list[Event]:
        text, part = "".join(self._pieces), self._part()
        return [
            self._event("output_text.done", text=text, logprobs=[*self._logprobs]),
            self._event("content_part.done", part=part),
        ]

    def _part(self) -> dict[str, Any]:
        text = "".join(self._pieces)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self._logprobs]}

    def _event(self, kind: str, **fields: Any) -> Event:
        return _event(kind, self.id, self.place, content_index=0, **fields)


class ReasoningItem:
    """The model's reasoning before it answers."""

    def __init__(self, item_id: str, place: int) -> None:
        self.id, self.place = item_id, place
        self._pieces: list[str] = []

    def add(self, text: str) -> Event:
        """The event of this piece."""
        self._pieces.append(text)
        return self._event("reasoning_text.delta", delta=text)

    def whole(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part()]
        return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}

    def begin(self) -> list[Event]:
        return [self._event("content_part.added", part=self._part())]

    def end(self, status: str) -> list[Event]:
        part = self._part()
        return [
            self._event("reasoning_text.done", text=part["text"]),
            self._event("content_part.done", part=part),
        ]

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self._pieces)}

    def _event(self, kind: str, **fields: Any) -> Event:
        return _event(kind, self.id, self.place, content_index=0, **fields)


class CallItem:
    """A call of a function."""

    def __init__(self, item_id: str, place: int, call_id: str, name: str) -> None:
        self.id, self.place = item_id, place
        self._call_id, self._name = call_id, name
        self._pieces: list[str] = []

    @property
    def call(self) -> ToolCall:
        return ToolCall(self._call_id, self._name, "".join(self._pieces))

    def add(self, arguments: str) -> Event:
        """The event of this piece."""
        self._pieces.append(arguments)
        return _event("function_call_arguments.delta", self.id, self.place, delta=arguments)

    def whole(self, status: str) -> dict[str, Any]:
        call = self.call
        return {
            "type": "function_call",
            "id": self.id,
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": status,
        }

    def begin(self) -> list[Event]:
        return []

    def end(self, status: str) -> list[Event]:
        call = self.call
        return [
            _event(
                "function_call_arguments.done",
                self.id,
                self.place,
                name=call.name,
                arguments=call.arguments,
            )
        ]


def _event(kind: str, item_id: str, place: int, **fields: Any) -> Event:
    return {"type": f"response.{kind}", "item_id": item_id, "output_index": place, **fields}
