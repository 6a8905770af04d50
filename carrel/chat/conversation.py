"""The turns so far, and the document that they are about."""

from __future__ import annotations

from carrel.chat.exchange import Message


class Conversation:
    """Keeps whole turns only: a question without an answer is never part of the next request."""

    def __init__(self, system: str | None = None, document: str | None = None) -> None:
        self._system = system
        self._document = document
        self._turns: list[Message] = []

    def request(self, question: str) -> list[Message]:
        """The messages that ask `question`; the document stands before the first one, a blank line between.

        Changes nothing; `add` keeps the turn once it was answered.
        """
        system = [Message("system", self._system)] if self._system else []
        return [*system, *self._turns, self._user(question)]

    def add(self, question: str, answer: str) -> None:
        """Keep a turn."""
        self._turns += [self._user(question), Message("assistant", answer)]

    def reset(self) -> None:
        """Forget the turns; the document stays and stands before the next question again."""
        self._turns.clear()

    def open(self, document: str) -> None:
        """Start over, about another document."""
        self._document = document
        self.reset()

    def _user(self, question: str) -> Message:
        is_first = not self._turns
        return Message("user", f"{self._document}\n\n{question}" if self._document and is_first else question)
