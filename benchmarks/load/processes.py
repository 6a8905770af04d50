"""The processes of a `carrel serve` on this machine: what each takes, and faults that strike one of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from benchmarks.errors import BenchmarkError

# By a word of the command; Ray gives the process that has the arena its title.
GATEWAY, WORKER, STORE, ARENA = "gateway", "worker", "store", "arena"
WORDS = {GATEWAY: "gateway", WORKER: "gpu_worker", STORE: "kv_store", ARENA: "ray::StoreActor"}
SUPERVISOR, ALL = "supervisor", "all"
PROCESSES = (SUPERVISOR, *WORDS)
OWN_MIB, DESCRIPTORS, PID = "own MiB", "descriptors", "pid"


class How(StrEnum):
    """KILLED: SIGKILL. STOPPED: SIGSTOP, and nobody ever lets it go on."""

    KILLED = "killed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Blow:
    """A fault, and the process that it hits."""

    who: str
    how: How


# Each process in turn; the arena is the store's memory, so it stands for the store.
ROUND = tuple(Blow(who, how) for how in How for who in (WORKER, GATEWAY, ARENA))


class Server:
    """The processes below a `carrel serve`, as they are now: some may be away."""

    def __init__(self, pid: int) -> None:
        """Raises BenchmarkError where there is no such process."""
        try:
            self._supervisor = psutil.Process(pid)
        except psutil.NoSuchProcess:
            raise BenchmarkError(
                f"--server {pid}: there is no such process; give that of carrel serve"
            ) from None

    def find(self) -> dict[str, int]:
        """The process ids by name, of those that are there."""
        found = {SUPERVISOR: self._supervisor.pid}
        for child in self._descendants():
            try:
                words = child.cmdline()
            except psutil.Error:
                continue
            for name, word in WORDS.items():
                if word in words or any(part.startswith("ray::") and part.startswith(word) for part in words):
                    found.setdefault(name, child.pid)
        return found

    def is_whole(self) -> bool:
        return set(self.find()) == set(PROCESSES)

    def strike(self, blow: Blow) -> int:
        """The id of the process that was struck. Raises BenchmarkError where it is not there."""
        pid = self.find().get(blow.who)
        if pid is None:
            raise BenchmarkError(f"the {blow.who} is away")
        psutil.Process(pid).send_signal(signal.SIGKILL if blow.how is How.KILLED else signal.SIGSTOP)
        return pid

    def gauges(self) -> dict[str, float]:
        """Return the gauges of each process by name, and of all below the supervisor together."""
        found: dict[str, float] = {}
        for name, pid in self.find().items():
            if gauges := process_gauges(pid):
                found |= {f"{name} {what}": value for what, value in (gauges | {PID: float(pid)}).items()}
        for child in self._descendants():
            for what, value in process_gauges(child.pid).items():
                found[f"{ALL} {what}"] = found.get(f"{ALL} {what}", 0.0) + value
        return found

    def _descendants(self) -> Iterator[psutil.Process]:
        try:
            yield from self._supervisor.children(recursive=True)
        except psutil.NoSuchProcess:
            raise BenchmarkError("carrel serve has ended") from None


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, though its parent may not have noticed."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def process_gauges(pid: int) -> dict[str, float]:
    """Descriptors, and MiB of memory of its own, which a shared arena is no part of. None of a process that is gone."""
    folder = Path("/proc") / str(pid)
    try:
        fields = dict(
            line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
        )
        descriptors = len(list((folder / "fd").iterdir()))
    except OSError:
        return {}
    if "RssAnon" not in fields:
        return {}
    return {OWN_MIB: int(fields["RssAnon"].split()[0]) / 1024, DESCRIPTORS: float(descriptors)}
