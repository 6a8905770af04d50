"""Runs a process that does one thing and ends, and shows its progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from carrel.errors import ChildError
from carrel.process.events import Progress as ProgressEvent
from carrel.process.events import Status, parse_event
from carrel.serve.process import Child, ChildSpec, Line, Message, describe_exit

POLL_S = 0.2
ERROR_PREFIX = "gpu_worker: "


def run_to_end(spec: ChildSpec, environment: Mapping[str, str], notes: Console) -> list[str]:
    """The texts of its `Status` events. Main thread only. Raises ChildError with the process's own words."""
    inbox: SimpleQueue[Message] = SimpleQueue()
    child = Child(spec, environment, inbox)
    try:
        return _follow(child, inbox, notes)
    finally:
        child.kill()


def _follow(child: Child, inbox: SimpleQueue[Message], notes: Console) -> list[str]:
    said: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, disable=not notes.is_terminal) as bar:
        task = bar.add_task("start", total=None)
        for line in _messages(child, inbox):
            if not isinstance(line, Line):
                continue
            if line.is_stderr:
                if not line.text.startswith(ERROR_PREFIX):
                    notes.print(line.text, markup=False, highlight=False)
                continue
            event = parse_event(line.text)
            if isinstance(event, Status):
                said.append(event.text)
            elif isinstance(event, ProgressEvent):
                bar.update(task, description=event.stage, completed=event.done, total=event.total)
                if not notes.is_terminal and event.done >= event.total:
                    notes.print(f"{event.stage}: done", highlight=False)
    if code := child.exit_code():
        raise _failure(child.spec.name, code, child.last_lines())
    return said


def _messages(child: Child, inbox: SimpleQueue[Message]) -> Iterator[Message]:
    """Yield the messages that arrive until the child has ended."""
    while child.exit_code() is None:
        with suppress(Empty):
            yield inbox.get(timeout=POLL_S)
    # waits for the readers, so that the inbox has all
    child.last_lines()
    while not inbox.empty():
        yield inbox.get_nowait()


def _failure(name: str, code: int, lines: tuple[str, ...]) -> ChildError:
    last = lines[-1] if lines else "it said nothing"
    if code == 2 and last.startswith(ERROR_PREFIX):
        return ChildError(last.removeprefix(ERROR_PREFIX), lines, code)
    return ChildError(f"the {name} ended with {describe_exit(code)}: {last}", lines)
