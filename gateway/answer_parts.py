"""The parts of answers: reasoning, text and calls of tools, told from the text as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gateway.answer_text import num_ambiguous
from gateway.exchange import ChoiceFinished, Event, ReasoningDelta, TextDelta, ToolCallDelta
from gateway.tool_calls import CallsReader

BEGIN, END = "<think>", "</think>"


class ReasoningReader:
    """Parts one answer's text as it comes, without the tags and the white space around them."""

    def __init__(self, is_inside: bool, hides: bool = False) -> None:
        """is_inside: the prompt has the first tag already. hides: the reasoning is told to nobody."""
        self._is_inside = is_inside
        self._hides = hides
        self._is_over = False
        self._held = ""
        self._has_text = self._is_stripping = False

    def push(self, text: str) -> tuple[str, str]:
        """(more of the reasoning, more of the answer)"""
        self._held += text
        if not self._is_inside and not self._is_over:
            begun = self._held.lstrip()
            if len(begun) < len(BEGIN) and BEGIN.startswith(begun):
                return "", ""
            self._is_inside = begun.startswith(BEGIN)
            self._is_over = not self._is_inside
            if self._is_inside:
                self._held = begun.removeprefix(BEGIN)
        reasoning = self._take_reasoning() if self._is_inside else ""
        return self._told(reasoning), self._take_answer() if self._is_over else ""

    def flush(self) -> tuple[str, str]:
        """Return the text that was held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return (self._told(held.rstrip()), "") if self._is_inside else ("", held)

    def _told(self, reasoning: str) -> str:
        return "" if self._hides else reasoning

    def _take_reasoning(self) -> str:
        text, found, rest = self._held.partition(END)
        if found:
            self._is_inside, self._is_over, self._is_stripping, self._held = False, True, True, rest
        split = len(text) if found else len(text) - num_ambiguous(text, (END,))
        kept = text[:split].rstrip()
        if not found:
            self._held = text[len(kept) :]
        kept = kept if self._has_text else kept.lstrip()
        self._has_text |= bool(kept)
        return kept

    def _take_answer(self) -> str:
        held, self._held = self._held, ""
        if self._is_stripping:
            held = held.lstrip()
            self._is_stripping = not held
        return held


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
