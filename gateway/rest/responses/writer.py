"""An answer as OpenAI's responses have it: one object, or the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
from gateway.rest.answer import Answer, ReplyWriter, usage_answer
from gateway.rest.answers import CachedTokens
from gateway.rest.errors import error_body
from gateway.rest.reply import named_frame
from gateway.rest.responses import schemas
from gateway.rest.responses.function_names import FunctionNames
from gateway.rest.responses.items import CallItem, Item, TextItem
from gateway.rest.responses.schemas import ResponseAnswer, Status, StreamEvent


class ResponseWriter(ReplyWriter):
    """A response, or its items as they grow."""

    def __init__(
        self,
        begun: ResponseAnswer,
        names: FunctionNames,
        done: Callable[[ResponseAnswer, Message], None],
    ) -> None:
        """begun: the answer before it has any output. names: of the functions that the model may call. done: is given
        the whole answer, also as a message, before the client is."""
        self._begun = begun
        self._names = names
        self._done = done
        self._num_events = 0
        self._is_begun = False
        self._items: list[Item] = []
        # what the last item, which grows, holds: reasoning, text, or a call by its place; None: none grows
        self._open: str | int | None = None
        self._status: Status = "completed"
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[CallItem] = []

    def whole(self, answer: Answer) -> ResponseAnswer:
        choice = answer.choices[0]
        events: list[Event] = []
        if choice.reasoning:
            events.append(ReasoningDelta(0, "".join(choice.reasoning)))
        if choice.text or choice.logprobs:
            events.append(TextDelta(0, choice.text, tuple(choice.logprobs)))
        for place, call in enumerate(choice.calls):
            events.append(ToolCallDelta(0, place, call.id, call.name, call.arguments))
        for event in (*events, ChoiceFinished(0, choice.finish_reason or "length")):
            # the items grow by the way
            list(self._events(event))
        return self._finish(answer.usage)

    async def frames(self, event: Event) -> bytes:
        return b"".join(map(self._frame, self._events(event)))

    def failed(self, error: ServiceError | None) -> bytes:
        told = error_body(error).error
        return self._frame(schemas.ErrorEvent(code=str(told.code), message=told.message, param=told.param))

    def _frame(self, event: StreamEvent) -> bytes:
        event.sequence_number = self._num_events
        self._num_events += 1
        return named_frame(event)

    def _events(self, event: Event) -> Iterator[StreamEvent]:
        match event:
            case Prefilling():
                yield from self._begin()
            case ReasoningDelta(text=text):
                self._thoughts.append(text)
                if self._open != "reasoning":
                    yield from self._begin_item("reasoning", TextItem(*self._next_item, True))
                yield self._items[-1].add(text)
            case TextDelta(text=text, logprobs=logprobs) if text or logprobs:
                self._text.append(text)
                if self._open != "text":
                    yield from self._begin_item("text", TextItem(*self._next_item, False))
                yield self._items[-1].add(text, logprobs)
            case ToolCallDelta(place=place, arguments=arguments):
                if self._open != place:
                    self._calls.append(
                        CallItem(*self._next_item, event.id, event.name, self._names.own(event.name))
                    )
                    yield from self._begin_item(place, self._calls[-1])
                if arguments:
                    yield self._items[-1].add(arguments)
            case ChoiceFinished(finish_reason=reason):
                self._status = "incomplete" if reason == "length" else "completed"
                if not self._items:
                    yield from self._begin_item("text", TextItem(*self._next_item, False))
                yield from self._end_item(self._status)
            case Completed(usage=usage):
                yield self._told(self._status, self._finish(usage))
            case TextDelta():
                yield from self._begin()

    def _begin(self) -> Iterator[StreamEvent]:
        if not self._is_begun:
            self._is_begun = True
            yield self._told("created", self._begun)
            yield self._told("in_progress", self._begun)

    @property
    def _next_item(self) -> tuple[str, int]:
        """The id and the place of the next item."""
        place = len(self._items)
        return f"item_{place}_{self._begun.id.removeprefix('resp_')}", place

    def _begin_item(self, what: str | int, item: Item) -> Iterator[StreamEvent]:
        yield from self._begin()
        yield from self._end_item("completed")
        self._items.append(item)
        self._open = what
        yield schemas.ItemEvent(
            type="response.output_item.added", output_index=item.place, item=item.whole("in_progress")
        )
        yield from item.begin()

    def _end_item(self, status: Status) -> Iterator[StreamEvent]:
        if self._open is not None:
            self._open, item = None, self._items[-1]
            yield from item.end()
            yield schemas.ItemEvent(
                type="response.output_item.done", output_index=item.place, item=item.whole(status)
            )

    def _told(self, what: str, response: ResponseAnswer) -> StreamEvent:
        kind: Any = f"response.{what}"
        return schemas.ResponseEvent(type=kind, response=response)

    def _finish(self, usage: Usage | None) -> ResponseAnswer:
        last = len(self._items) - 1
        changes = {
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": [
                item.whole(self._status if item.place == last else "completed") for item in self._items
            ],
            "usage": None if usage is None else _usage(usage),
        }
        response = self._begun.model_copy(update=changes)
        calls = tuple(item.call for item in self._calls)
        thoughts = "".join(self._thoughts) or None
        self._done(response, Message("assistant", "".join(self._text), calls, reasoning=thoughts))
        return response


def _usage(usage: Usage) -> schemas.ResponseUsage:
    told = schemas.ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=CachedTokens(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=schemas.ReasoningTokens(reasoning_tokens=0),
        total_tokens=usage.total_tokens,
    )
    if (ours := usage_answer(usage).carrel) is not None:
        told.carrel = ours
    return told
