"""A model's reasoning, separated from its answer by its tags."""

from __future__ import annotations

from gateway.answer_text import num_ambiguous

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
