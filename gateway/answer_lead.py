"""The white space that a chat template writes before an answer and that is not part of it."""

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
