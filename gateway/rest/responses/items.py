"""Items of a response's output as they grow: text, reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.exchange import TokenLogprob, ToolCall
from gateway.rest.answers import ChatToken
from gateway.rest.logprobs import chat_logprobs
from gateway.rest.responses import schemas
from gateway.rest.responses.function_names import FunctionName
from gateway.rest.responses.schemas import Output, Status, StreamEvent


class Item:
    """One item, as it is so far."""

    def __init__(self, item_id: str, place: int) -> None:
        """place: its place in the output."""
        self.id, self.place = item_id, place
        self._where: dict[str, Any] = {"item_id": item_id, "output_index": place}
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The pieces so far."""
        return "".join(self._pieces)

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> StreamEvent:
        """Take a piece. Returns its event."""
        raise NotImplementedError

    def whole(self, status: Status) -> Output:
        """Return the item as it is now."""
        raise NotImplementedError

    def begin(self) -> list[StreamEvent]:
        """Return the events after that of the item itself."""
        return []

    def end(self) -> list[StreamEvent]:
        """Return the events before that of the item's end."""
        raise NotImplementedError


class TextItem(Item):
    """The answer's text, with its log probabilities where they were asked for, or the model's reasoning."""

    def __init__(self, item_id: str, place: int, is_reasoning: bool) -> None:
        super().__init__(item_id, place)
        self._where["content_index"] = 0
        self._is_reasoning = is_reasoning
        kind = "reasoning_text" if is_reasoning else "output_text"
        self._delta: Any = f"response.{kind}.delta"
        self._done: Any = f"response.{kind}.done"
        self._logprobs: list[ChatToken] = []

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> StreamEvent:
        told = chat_logprobs(logprobs).content
        self._pieces.append(text)
        self._logprobs += told
        return schemas.TextEvent(type=self._delta, delta=text, **self._scores(told), **self._where)

    def whole(self, status: Status) -> Output:
        parts: list[Any] = [] if status == "in_progress" else [self._part()]
        if self._is_reasoning:
            return schemas.OutputThought(id=self.id, summary=[], content=parts, status=status)
        return schemas.OutputMessage(id=self.id, role="assistant", content=parts, status=status)

    def begin(self) -> list[StreamEvent]:
        return [schemas.PartEvent(type="response.content_part.added", part=self._part(), **self._where)]

    def end(self) -> list[StreamEvent]:
        scores = self._scores([*self._logprobs])
        return [
            schemas.TextDoneEvent(type=self._done, text=self.text, **scores, **self._where),
            schemas.PartEvent(type="response.content_part.done", part=self._part(), **self._where),
        ]

    def _part(self) -> schemas.OutputText | schemas.ReasoningText:
        if self._is_reasoning:
            return schemas.ReasoningText(text=self.text)
        return schemas.OutputText(text=self.text, annotations=[], logprobs=[*self._logprobs])

    def _scores(self, logprobs: list[ChatToken]) -> dict[str, Any]:
        return {} if self._is_reasoning else {"logprobs": logprobs}


class CallItem(Item):
    """A call of a function."""

    def __init__(self, item_id: str, place: int, call_id: str, flat: str, own: FunctionName) -> None:
        """flat: the model's name of the function. own: the client's."""
        super().__init__(item_id, place)
        self._call_id, self._flat, self._own = call_id, flat, own

    @property
    def call(self) -> ToolCall:
        """The call in the model's words."""
        return ToolCall(self._call_id, self._flat, self.text)

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> StreamEvent:
        self._pieces.append(text)
        return schemas.ArgumentsEvent(delta=text, **self._where)

    def whole(self, status: Status) -> Output:
        call = schemas.OutputCall(
            id=self.id, call_id=self._call_id, name=self._own.name, arguments=self.text, status=status
        )
        if self._own.namespace is not None:
            call.namespace = self._own.namespace
        return call

    def end(self) -> list[StreamEvent]:
        return [schemas.ArgumentsDoneEvent(name=self._own.name, arguments=self.text, **self._where)]
