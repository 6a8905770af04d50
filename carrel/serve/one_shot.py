"""Processes that do one thing and end: a measurement with its progress, and checks of options."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from queue import Empty, Queue

from rich.console import Console

from carrel.errors import ChildError
from carrel.process.events import Progress, Status, parse_event
from carrel.process.options import OptionError
from carrel.progress import RunProgress
from carrel.serve.process import UNUSABLE_EXIT_CODE, Child, ChildSpec, Line, describe_exit

POLL_S = 0.05
ERROR_PREFIX = "gpu_worker: "


def run_to_end(spec: ChildSpec, environment: Mapping[str, str], notes: Console) -> list[str]:
    """Run a process, and return the texts of its `Status` events. Main thread only.

    Raises ChildError with the process's own words.
    """
    said: list[str] = []
    inbox: Queue[Line] = Queue()
    child = Child(spec, environment, inbox)
    try:
        with RunProgress(None, notes) as progress:
            progress.doing("start")
            for line in _lines(child, inbox):
                event = None if line.is_stderr else parse_event(line.text)
                if line.is_stderr and not line.text.startswith(ERROR_PREFIX):
                    progress.tell(line.text)
                elif isinstance(event, Status):
                    said.append(event.text)
                elif isinstance(event, Progress):
                    progress.doing(event.stage, event.done, event.total)
                    if not notes.is_terminal and event.done >= event.total:
                        progress.tell(f"{event.stage}: done")
    finally:
        child.kill()
    if code := child.poll():
        raise _failure(child.name, code, child.last_lines())
    return said


def run_checks(specs: Sequence[ChildSpec], environment: Mapping[str, str]) -> None:
    """Run these programs side by side, and return when all have ended. Main thread only.

    Raises OptionError with the last line of the first program that refuses, without its name. Any other failure is
    ignored here: the process that the program checks for will report it.
    """
    running: list[Child] = []
    try:
        for spec in specs:
            running.append(Child(spec, environment, Queue()))
        while running:
            for check in list(running):
                if (code := check.poll()) is None:
                    continue
                running.remove(check)
                if code == UNUSABLE_EXIT_CODE:
                    lines = check.last_lines() or ("check: a check of the options failed without a reason",)
                    raise OptionError(lines[-1].partition(": ")[2])
            time.sleep(POLL_S)
    finally:
        for check in running:
            check.kill()


def _lines(child: Child, inbox: Queue[Line]) -> Iterator[Line]:
    """Yield the lines that arrive until the child has ended."""
    while child.poll() is None:
        with suppress(Empty):
            yield inbox.get(timeout=POLL_S)
    # waits for the readers, so that the inbox has all
    child.last_lines()
    while not inbox.empty():
        yield inbox.get_nowait()


def _failure(name: str, code: int, lines: tuple[str, ...]) -> ChildError:
    last = lines[-1] if lines else "it said nothing"
    if code == UNUSABLE_EXIT_CODE and last.startswith(ERROR_PREFIX):
        return ChildError(last.removeprefix(ERROR_PREFIX), lines, code)
    return ChildError(f"the {name} ended with {describe_exit(code)}: {last}", lines)
