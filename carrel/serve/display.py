"""The supervisor's output: lines, one changing line on a terminal, or JSON objects for programs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from carrel.errors import ChildError
from carrel.process.events import Progress
from carrel.process.log_lines import json_line

# of this process in lines that are objects
OWN_NAME = "carrel"
# steps of a stage that are worth a line
QUARTERS = 4
# between two lines of a process's status; one older than this is of an idle server, and leaves a terminal
STATUS_SECONDS = 10.0


class Listener:
    """Learns what a supervisor and its processes do. Each method does nothing here."""

    def starting(self, child: str) -> None:
        """A process is started."""

    def progress(self, child: str, progress: Progress) -> None:
        """A process that starts has done a part of a stage."""

    def ready(self, child: str) -> None:
        """A process serves."""

    def status(self, child: str, text: str) -> None:
        """A process under load reported its state."""

    def line(self, child: str, text: str) -> None:
        """A process wrote a line."""

    def lost(self, child: str, text: str, lines: Sequence[str]) -> None:
        """A process died and will be started again. lines: its last."""

    def message(self, text: str) -> None:
        """A sentence of the supervisor."""

    def draining(self) -> None:
        """A stop was requested; the processes drain."""

    def failed(self, error: ChildError) -> None:
        """A process failed, and the others are ended."""

    def close(self) -> None:
        """All processes have ended."""


class Display(Listener):
    """A line for each thing that happens; stages by quarters, and a status at most every ten seconds for each process.
    On a terminal both are one line that changes, and goes away where nothing starts and there is no load.

    Lines of a process that is still starting are held back until it serves, unless `is_verbose`: if it dies, its error
    is shown once, with the last lines. That a process died goes to `errors`; without it, to `console` too.
    """

    def __init__(
        self,
        console: Console,
        is_verbose: bool = False,
        errors: Console | None = None,
        as_json: bool = False,
    ) -> None:
        """as_json: each line is an object, also on a terminal: a process's own as they are, all else as this process's,
        and without the banner, which is for people."""
        self._console = console
        self._errors = errors or console
        self._is_verbose = is_verbose
        self._as_json = as_json
        self._held: dict[str, list[str]] = {}
        self._quarters: dict[tuple[str, str], int] = {}
        self._last_status: dict[str, float] = {}
        # what each process does now, and until when that is news
        self._now: dict[str, tuple[str, float]] = {}
        self._live: Live | None = None
        if console.is_terminal and not as_json:
            self._live = Live(
                console=console, get_renderable=self._changing_line, refresh_per_second=2, transient=True
            )

    def starting(self, child: str) -> None:
        self._held[child] = []
        self._tell_now(child, f"{child}: starting", math.inf, is_worth_a_line=True)

    def progress(self, child: str, progress: Progress) -> None:
        has_total = progress.total > 0
        quarter = QUARTERS * progress.done // progress.total if has_total else 0
        is_new = self._quarters.get((child, progress.stage)) != quarter
        self._quarters[child, progress.stage] = quarter
        of_total = f" {progress.done}/{progress.total}" if has_total else ""
        self._tell_now(child, f"{child}: {progress.stage}{of_total}", math.inf, is_new)

    def ready(self, child: str) -> None:
        self._forget(child)
        for text in self._held.pop(child, []):
            self._print_line(child, text)
        self.message(f"{child}: ready")

    def status(self, child: str, text: str) -> None:
        now = time.monotonic()
        is_new = now - self._last_status.get(child, -STATUS_SECONDS) >= STATUS_SECONDS
        if is_new:
            self._last_status[child] = now
        self._tell_now(child, f"{child}: {text}", now + STATUS_SECONDS, is_new)

    def line(self, child: str, text: str) -> None:
        if child in self._held and not self._is_verbose:
            self._held[child].append(text)
        else:
            self._print_line(child, text)

    def lost(self, child: str, text: str, lines: Sequence[str]) -> None:
        """A process died and is started again: say so in one line. `lines`, its last, are shown if they were held."""
        self._forget(child)
        self._print(self._errors, f"✗ {escape(text)}", "ERROR", text)
        for line in lines if self._held.pop(child, None) is not None else ():
            self._print_line(child, line)

    def message(self, text: str) -> None:
        self._print(self._console, escape(text), "INFO", text)

    def show(self, renderable: RenderableType) -> None:
        """Something for people alone."""
        if not self._as_json:
            self._console.print(renderable)

    def draining(self) -> None:
        self.close()
        self.message("draining: running requests may finish; Ctrl-C again to stop at once")

    def failed(self, error: ChildError) -> None:
        """A process failed: say which, with its last lines."""
        self.close()
        lines = [f"\n  [red]{escape(text)}[/red]" for text in error.lines]
        told = f"✗ {escape(str(error))}{'; its last lines:' if lines else ''}{''.join(lines)}"
        self._print(self._console, told, "ERROR", str(error), "\n".join(error.lines))

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()

    def _tell_now(self, child: str, text: str, until: float, is_worth_a_line: bool) -> None:
        """Show what a process does now: on the line that changes, or as a line of its own where it is worth one."""
        if self._live is None:
            if is_worth_a_line:
                self.message(text)
            return
        self._now[child] = (text, until)
        self._live.start()
        if is_worth_a_line:
            self._live.refresh()

    def _forget(self, child: str) -> None:
        self._now.pop(child, None)
        if not self._now:
            self.close()

    def _changing_line(self) -> Text:
        fresh = [text for text, until in self._now.values() if time.monotonic() < until]
        return Text(" · ".join(fresh), style="cyan", no_wrap=True, overflow="ellipsis")

    def _print_line(self, child: str, text: str) -> None:
        """A line that a process wrote."""
        if self._as_json and _is_object(text):
            self._console.out(text, highlight=False)
        else:
            self._print(self._console, f"[dim]{child:>7} │[/dim] {escape(text)}", "INFO", text, process=child)

    def _print(
        self, console: Console, markup: str, level: str, text: str, error: str = "", process: str = OWN_NAME
    ) -> None:
        """`markup` for people; the others for programs."""
        if self._as_json:
            console.out(json_line(process, level, text, error=error), highlight=False)
        else:
            console.print(markup, highlight=False, soft_wrap=True)


def _is_object(text: str) -> bool:
    try:
        return type(json.loads(text)) is dict
    except ValueError:
        return False
