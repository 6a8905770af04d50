"""Runs `python -m gpu_worker.calibration` and shows its progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from carrel.errors import ChildError
from carrel.process.events import Progress as ProgressEvent
from carrel.process.events import Status, parse_event
from carrel.serve.process import Child, ChildSpec, Line, Message, describe_exit
from carrel.serve.runtime_dir import runtime_dir
from carrel.serve.signals import sigterm_as_interrupt

POLL_S = 0.2
ERROR_PREFIX = "gpu_worker: "


def calibrate(
    model: str,
    samples: Sequence[Sequence[int]],
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    notes: Console,
) -> list[str]:
    """The process's message about the file it wrote. Main thread only.

    flags: of `python -m gpu_worker.calibration`; those that are None are left out. SIGTERM ends it as Ctrl-C does.
    Raises ChildError with the process's own words.
    """
    with runtime_dir() as folder, sigterm_as_interrupt():
        path = folder / "samples.jsonl"
        path.write_text("".join(f"{json.dumps(list(sample))}\n" for sample in samples))
        inbox: SimpleQueue[Message] = SimpleQueue()
        child = Child(_spec(model, path, flags), environment, inbox)
        try:
            return _follow(child, inbox, notes)
        finally:
            child.kill()


def _spec(model: str, samples: Path, flags: Mapping[str, object]) -> ChildSpec:
    given = [text for name, value in flags.items() if value is not None for text in (name, str(value))]
    # -P: a folder of the same name where the user stands is not taken for ours
    command = (sys.executable, "-P", "-m", "gpu_worker.calibration", model, "--samples", str(samples))
    return ChildSpec("calibration", (*command, *given, "--json-events"), lambda: True, 0, 0)


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
        raise _failure(code, child.last_lines())
    return said


def _messages(child: Child, inbox: SimpleQueue[Message]) -> Iterator[Message]:
    """What comes in until the child has ended."""
    while child.exit_code() is None:
        with suppress(Empty):
            yield inbox.get(timeout=POLL_S)
    # waits for the readers, so that the inbox has all
    child.last_lines()
    while not inbox.empty():
        yield inbox.get_nowait()


def _failure(code: int, lines: tuple[str, ...]) -> ChildError:
    last = lines[-1] if lines else "it said nothing"
    if code == 2 and last.startswith(ERROR_PREFIX):
        return ChildError(last.removeprefix(ERROR_PREFIX), lines, code)
    return ChildError(f"the calibration ended with {describe_exit(code)}: {last}", lines)
