"""The terminal conversation: questions, answers and the commands that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from carrel.chat.answer import Answer, cost_line, take_answer
from carrel.chat.client import ChatClient
from carrel.chat.conversation import ChatOptions, Conversation, Model, not_text
from carrel.errors import CarrelError
from carrel.process.options import OptionError
from carrel.texts import read_text

HELP = (
    "/file PATH  talk about a document    /reset  forget the turns    /quit  leave    Ctrl-C  stop an answer"
)


class Repl:
    """Reads questions until /quit or the end of input. Errors are shown and the conversation goes on."""

    def __init__(
        self,
        client: ChatClient,
        model: Model,
        conversation: Conversation,
        options: ChatOptions,
        console: Console,
        notes: Console,
    ) -> None:
        self._client = client
        self._model = model
        self._conversation = conversation
        self._options = options
        self._console = console
        self._notes = notes

    def run(self, read: Callable[[str], str] = input) -> None:
        """Serve one user; `read` shows a prompt and returns a line, or raises EOFError at the end."""
        limit = f", up to {self._model.max_model_len:,} tokens" if self._model.max_model_len else ""
        self._note(f"{self._model.id}{limit}. {HELP}")
        while True:
            try:
                line = read("\n› ").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note("/quit or Ctrl-D leaves")
                continue
            except UnicodeDecodeError:
                self._warn(not_text("the question"))
                continue
            if line == "/quit":
                return
            if line:
                try:
                    self.handle(line)
                except (CarrelError, OptionError) as error:
                    self._warn(error)

    def handle(self, line: str) -> None:
        """One line of the user: a command or a question. Raises CarrelError and OptionError."""
        command, _, argument = line.partition(" ")
        if command == "/reset":
            self._conversation.reset()
            self._note("the turns are forgotten")
        elif command == "/file" and argument:
            self.open(Path(argument.strip()))
        elif command.startswith("/"):
            self._note(HELP)
        else:
            self.ask(line)

    def open(self, path: Path) -> None:
        """Talk about a document from here on."""
        document = read_text(path)
        self._conversation.open(document)
        self._note(f"{path}: {len(document):,} characters stand before your next question")

    def ask(self, question: str) -> Answer:
        """Ask, stream the answer, show its cost, keep the turn."""
        messages = self._conversation.request(question)
        with closing(self._client.stream(self._model.id, messages, self._options)) as events:
            answer = take_answer(events, self._write)
        self._console.print()
        self._note(cost_line(answer))
        if answer.text:
            self._conversation.add(question, answer.text)
        return answer

    def _write(self, text: str) -> None:
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def _warn(self, error: Exception) -> None:
        self._notes.print(f"[red]{escape(str(error))}[/red]", highlight=False)

    def _note(self, text: str) -> None:
        self._notes.print(f"[dim]{escape(text)}[/dim]", highlight=False)
