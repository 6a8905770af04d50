"""The answer within the model's text: without the template's leading white space, up to a stop string."""

from __future__ import annotations


class AnswerLead:
    """Passes an answer's text through without `lead` at its start; holds back what may still become it.

    Some templates put a space before each assistant message, so that its first word is tokenized as any other word.
    The model then generates that space as well.
    """

    def __init__(self, lead: str) -> None:
        self._lead = lead
        self._held = ""

    def push(self, text: str) -> str:
        if not self._lead:
            return text
        self._held += text
        if self._lead.startswith(self._held) and self._held != self._lead:
            return ""
        safe, self._held, self._lead = self._held.removeprefix(self._lead), "", ""
        return safe

    def flush(self) -> str:
        """The held text, once it is known that nothing follows."""
        safe, self._held, self._lead = self._held, "", ""
        return safe


class StopMatcher:
    """Passes text through, holding back what may still turn out to be a stop string.

    `push` and `flush` return text that is safe to send; `found` is the stop string once one was seen, and nothing after
    it is ever returned, nor it itself unless `keeps` is set.
    """

    def __init__(self, stops: tuple[str, ...], keeps: bool = False) -> None:
        self._stops = stops
        self._keeps = keeps
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        # the one that ends first: so it would be if the text came character by character
        seen = [
            (start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0
        ]
        if seen:
            end, start, self.found = min(seen)
            safe, self._held = self._held[: end if self._keeps else start], ""
            return safe
        split = len(self._held) - num_ambiguous(self._held, self._stops)
        safe, self._held = self._held[:split], self._held[split:]
        return safe

    def flush(self) -> str:
        """The held text, once it is known that nothing follows."""
        safe, self._held = self._held, ""
        return safe


def num_ambiguous(text: str, strings: tuple[str, ...]) -> int:
    """Length of the longest end of the text that begins one of the strings, but is not all of it."""
    return max(_overlap(text, each) for each in strings)


def _overlap(text: str, whole: str) -> int:
    for length in range(min(len(whole) - 1, len(text)), 0, -1):
        if text.endswith(whole[:length]):
            return length
    return 0
