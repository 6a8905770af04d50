"""The turns so far, the document that they are about, and what a chat request sends and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from carrel.process.options import OptionError


@dataclass(frozen=True)
class Message:
    """`role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatOptions:
    """Options that every request of a conversation carries. None leaves the choice to the server."""

    max_tokens: int | None = None
    temperature: float | None = None
    policy: str | None = None
    budget: float | int | None = None


@dataclass(frozen=True)
class Model:
    """A served model; `max_model_len` is 0 when the server does not say."""

    id: str
    max_model_len: int


@dataclass(frozen=True)
class Delta:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True)
class Usage:
    """Usage that the server reports with an answer. Only Carrel sends the fields from `policy` on."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    policy: str = ""
    context_tokens: int = 0
    cached_tokens: int = 0
    offloaded_tokens: int = 0
    attended_tokens: float = 0.0
    hit_rate: float = 0.0
    bytes_moved: int = 0


class Conversation:
    """Keeps whole turns only: a question without an answer is never part of the next request."""

    def __init__(self, system: str | None = None, document: str | None = None) -> None:
        self._system = system
        self._document = document
        self._turns: list[Message] = []

    def request(self, question: str) -> list[Message]:
        """The messages that ask `question`; the document stands before the first one, a blank line between.

        Changes nothing; `add` keeps the turn once it was answered. Raises OptionError for what is no text.
        """
        _check_text(self._system or "", "the system message")
        _check_text(question, "the question")
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


def not_text(what: str) -> OptionError:
    """Bytes of another encoding were given."""
    return OptionError(f"{what} is not UTF-8 text; convert it first")


def _check_text(text: str, what: str) -> None:
    """Python keeps bytes of the command line or of stdin that are no text as halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise not_text(what) from exc
