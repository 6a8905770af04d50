"""The parts of answers: reasoning, text and calls of tools, told from the text as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gateway.exchange import ChoiceFinished, Event, ReasoningDelta, TextDelta, ToolCallDelta
from gateway.reasoning import ReasoningReader
from gateway.tool_calls import CallsReader

CALLED = "tool_calls"


class AnswerParts:
    """Split the texts of one request's choices into reasoning, text and calls."""

    def __init__(
        self,
        new_reasoning: Callable[[], ReasoningReader] | None,
        new_calls: Callable[[int], CallsReader] | None,
    ) -> None:
        """Readers of each choice, by its index; None: nothing is looked for."""
        self._new_reasoning = new_reasoning
        self._new_calls = new_calls
        self._choices: dict[int, _ChoiceParts] = {}

    def events(self, event: Event) -> Iterator[Event]:
        """Yield the events that replace this event."""
        match event:
            case TextDelta():
                yield from self._of(event.index).push(event)
            case ChoiceFinished():
                yield from self._of(event.index).finish(event)
            case _:
                yield event

    def _of(self, index: int) -> _ChoiceParts:
        if index not in self._choices:
            reasoning = self._new_reasoning() if self._new_reasoning is not None else None
            calls = self._new_calls(index) if self._new_calls is not None else None
            self._choices[index] = _ChoiceParts(index, reasoning, calls)
        return self._choices[index]


class _ChoiceParts:
    def __init__(self, index: int, reasoning: ReasoningReader | None, calls: CallsReader | None) -> None:
        self._index = index
        self._reasoning = reasoning
        self._calls = calls

    def push(self, event: TextDelta) -> Iterator[Event]:
        reasoning, text = ("", event.text) if self._reasoning is None else self._reasoning.push(event.text)
        yield from self._tell(reasoning, text, event)

    def finish(self, event: ChoiceFinished) -> Iterator[Event]:
        if self._reasoning is not None:
            yield from self._tell(*self._reasoning.flush(), None)
        if self._calls is not None:
            yield from self._calls.flush()
            if self._calls.num_calls and event.finish_reason == "stop":
                event = ChoiceFinished(event.index, CALLED, event.stop)
        yield event

    def _tell(self, reasoning: str, text: str, event: TextDelta | None) -> Iterator[Event]:
        parts: list[TextDelta | ToolCallDelta]
        parts = [TextDelta(self._index, text)] if self._calls is None else list(self._calls.push(text))
        if event is not None and (event.logprobs or event.token_ids or not event.text):
            # these are of all tokens, whatever they say; and the first event says that there is a token
            yield replace(event, text="")
        if reasoning:
            yield ReasoningDelta(self._index, reasoning)
        yield from (part for part in parts if not isinstance(part, TextDelta) or part.text)
