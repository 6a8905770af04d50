"""What the user sees of the supervisor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.markup import escape

from carrel.errors import ChildError
from carrel.serve.events import Progress


class Display(ABC):
    """Shows the state of the processes. Lines of a process that is still starting are held back until it serves,
    unless `is_verbose`: if it dies, its error is shown once, with the last lines. That a process died goes to
    `errors`; without it, to `console` too."""

    def __init__(self, console: Console, is_verbose: bool = False, errors: Console | None = None) -> None:
        self._console = console
        self._errors = errors or console
        self._is_verbose = is_verbose
        self._held: dict[str, list[str]] = {}

    def starting(self, child: str) -> None:
        """A process was started."""
        self._held[child] = []

    @abstractmethod
    def progress(self, child: str, progress: Progress) -> None:
        """A process got further with loading."""

    def ready(self, child: str) -> None:
        """A process serves."""
        for text in self._held.pop(child, []):
            self._print_line(child, text)

    @abstractmethod
    def status(self, child: str, text: str) -> None:
        """A process under load reported its state."""

    def line(self, child: str, text: str) -> None:
        """A process wrote a line."""
        if child in self._held and not self._is_verbose:
            self._held[child].append(text)
        else:
            self._print_line(child, text)

    def lost(self, child: str, text: str, lines: Sequence[str]) -> None:
        """A process died and is started again: say so in one line. `lines`, its last, are shown if they were held."""
        self._errors.print(f"✗ {escape(text)}", highlight=False, soft_wrap=True)
        if self._held.pop(child, None) is not None:
            for line in lines:
                self._print_line(child, line)

    def message(self, text: str) -> None:
        """The supervisor has something to say."""
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Print the banner or any other picture."""
        self._console.print(renderable)

    def draining(self) -> None:
        """A stop was asked for."""
        self.message("draining: running requests may finish; Ctrl-C again to stop at once")

    def failed(self, error: ChildError) -> None:
        """A process failed: say which, with its last lines."""
        self.message(f"✗ {error}{'; its last lines:' if error.lines else ''}")
        for text in error.lines:
            self._console.print(f"  {escape(text)}", style="red", highlight=False, soft_wrap=True)

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was."""

    def _print_line(self, child: str, text: str) -> None:
        self._console.print(f"[dim]{child:>7} │[/dim] {escape(text)}", highlight=False, soft_wrap=True)
