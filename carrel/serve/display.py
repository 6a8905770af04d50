"""What the user sees of the supervisor: bars and a status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import rich.progress
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from carrel.errors import ChildError
from carrel.process.events import Progress
from carrel.process.log_lines import json_line

STATUS_INTERVAL_S = 10.0
# of this process in lines that are objects
OWN_NAME = "carrel"
# steps of a stage that are worth a line
QUARTERS = 4
# a status older than this is of an idle server: the line goes away
STATUS_AGE_S = 10.0


def create_display(
    console: Console, is_verbose: bool, errors: Console | None = None, as_json: bool = False
) -> Display:
    """The display that fits where `console` writes to. as_json: lines are objects, also on a terminal."""
    variant = JSONDisplay if as_json else TerminalDisplay if console.is_terminal else Display
    return variant(console, is_verbose, errors)


class Display:
    """For logs and pipes: a line for each thing that happens, but stages by quarters, and a status line at most every
    ten seconds for each process.

    Lines of a process that is still starting are held back until it serves, unless `is_verbose`: if it dies, its error
    is shown once, with the last lines. That a process died goes to `errors`; without it, to `console` too.
    """

    def __init__(self, console: Console, is_verbose: bool = False, errors: Console | None = None) -> None:
        self._console = console
        self._errors = errors or console
        self._is_verbose = is_verbose
        self._held: dict[str, list[str]] = {}
        self._quarters: dict[tuple[str, str], int] = {}
        self._last_status: dict[str, float] = {}

    def starting(self, child: str) -> None:
        self._held[child] = []
        self.message(f"{child}: starting")

    def progress(self, child: str, progress: Progress) -> None:
        quarter = QUARTERS * progress.done // progress.total if progress.total > 0 else 0
        if self._quarters.get((child, progress.stage)) != quarter:
            self._quarters[child, progress.stage] = quarter
            of_total = f" {progress.done}/{progress.total}" if progress.total > 0 else ""
            self.message(f"{child}: {progress.stage}{of_total}")

    def ready(self, child: str) -> None:
        self._release(child)
        self.message(f"{child}: ready")

    def status(self, child: str, text: str) -> None:
        """A process under load reported its state."""
        now = time.monotonic()
        if now - self._last_status.get(child, -STATUS_INTERVAL_S) >= STATUS_INTERVAL_S:
            self._last_status[child] = now
            self.message(f"{child}: {text}")

    def line(self, child: str, text: str) -> None:
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
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        self._console.print(renderable)

    def draining(self) -> None:
        self.message("draining: running requests may finish; Ctrl-C again to stop at once")

    def failed(self, error: ChildError) -> None:
        """A process failed: say which, with its last lines."""
        self.message(f"✗ {error}{'; its last lines:' if error.lines else ''}")
        for text in error.lines:
            self._console.print(f"  {escape(text)}", style="red", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""

    def _release(self, child: str) -> None:
        for text in self._held.pop(child, []):
            self._print_line(child, text)

    def _print_line(self, child: str, text: str) -> None:
        self._console.print(f"[dim]{child:>7} │[/dim] {escape(text)}", highlight=False, soft_wrap=True)


class JSONDisplay(Display):
    """Each line an object, for programs that read logs: a process's own as they are, all else as this process's.

    The banner is left out, which is for people.
    """

    def message(self, text: str) -> None:
        self._write(self._console, OWN_NAME, "INFO", text)

    def show(self, renderable: RenderableType) -> None:
        """Nothing."""

    def lost(self, child: str, text: str, lines: Sequence[str]) -> None:
        self._write(self._errors, OWN_NAME, "ERROR", text)
        for line in lines if self._held.pop(child, None) is not None else ():
            self._print_line(child, line)

    def failed(self, error: ChildError) -> None:
        self._write(self._console, OWN_NAME, "ERROR", str(error), error="\n".join(error.lines))

    def _print_line(self, child: str, text: str) -> None:
        if _is_object(text):
            self._console.out(text, highlight=False)
        else:
            self._write(self._console, child, "INFO", text)

    def _write(self, console: Console, process: str, level: str, text: str, error: str = "") -> None:
        console.out(json_line(process, level, text, error=error), highlight=False)


def _is_object(text: str) -> bool:
    try:
        return type(json.loads(text)) is dict
    except ValueError:
        return False


class TerminalDisplay(Display):
    """Bars for the stages of each starting process; a status line while there is load; nothing when idle."""

    def __init__(self, console: Console, is_verbose: bool = False, errors: Console | None = None) -> None:
        super().__init__(console, is_verbose, errors)
        self._bars = rich.progress.Progress(
            TextColumn("{task.description:<30}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._status: dict[str, tuple[float, str]] = {}
        self._live = Live(
            console=console, get_renderable=self._status_line, refresh_per_second=2, transient=True
        )

    def starting(self, child: str) -> None:
        self._held[child] = []
        self._live.stop()
        self._bars.start()
        self._tasks[child, ""] = self._bars.add_task(f"{child}: starting", total=None)

    def progress(self, child: str, progress: Progress) -> None:
        key = (child, progress.stage)
        total = progress.total or None
        if key not in self._tasks:
            # one bar for each process: its present stage
            self._remove_bars(child)
            self._tasks[key] = self._bars.add_task(escape(f"{child}: {progress.stage}"), total=total)
        self._bars.update(self._tasks[key], completed=progress.done, total=total)

    def ready(self, child: str) -> None:
        self._end_bars(child)
        self._release(child)
        self.message(f"✓ {child}")

    def lost(self, child: str, text: str, lines: Sequence[str]) -> None:
        # a dead process has no load
        self._status.pop(child, None)
        self._end_bars(child)
        super().lost(child, text, lines)

    def status(self, child: str, text: str) -> None:
        self._status[child] = (time.monotonic(), text)
        # a terminal takes one live picture at a time
        if not self._bars.live.is_started:
            self._live.start()

    def draining(self) -> None:
        self._bars.stop()
        super().draining()

    def failed(self, error: ChildError) -> None:
        self._bars.stop()
        super().failed(error)

    def close(self) -> None:
        self._bars.stop()
        self._live.stop()

    def _end_bars(self, child: str) -> None:
        self._remove_bars(child)
        if not self._tasks:
            self._bars.stop()

    def _remove_bars(self, child: str) -> None:
        for key in [key for key in self._tasks if key[0] == child]:
            self._bars.remove_task(self._tasks.pop(key))

    def _status_line(self) -> Text:
        now = time.monotonic()
        fresh = [text for at, text in self._status.values() if now - at < STATUS_AGE_S]
        return Text(" · ".join(fresh), style="cyan", no_wrap=True, overflow="ellipsis")
