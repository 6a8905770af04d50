"""Faults on purpose: at named points something is slow, is lost, stops half-way, or finds no memory, by a seed.

For tests, and for operators who try what a fault costs. Where none are named nothing is wrapped, and nothing asks.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from carrel.process.options import option

DEFAULT_DELAY_SECONDS = 0.1
MOST_DELAY_SECONDS = 600.0
_ITEM = re.compile(r"([a-z.]+):([a-z]+):([0-9.e-]+)(?::([0-9.]+))?")


class Point(StrEnum):
    """Where a fault may strike, those of the disk in the store, all others in the worker.

    STORE_CALL: a short call to the store. TRANSFER: a call that carries rows. ARENA_WRITE: rows of a prompt, or of a
    token, as the host writes them into the arena. ARENA_READ: rows as the store gathers them. INDEX: the training of an
    index. PROMPT: the memory of a prompt's pass. STEP: a decode step, captured or not. DISK_WRITE: a file of
    the store's disk tier. DISK_READ: what is read of one.
    """

    STORE_CALL = "store.call"
    TRANSFER = "transfer"
    ARENA_WRITE = "arena.write"
    ARENA_READ = "arena.read"
    INDEX = "index"
    PROMPT = "prompt"
    STEP = "step"
    DISK_WRITE = "disk.write"
    DISK_READ = "disk.read"


class Kind(StrEnum):
    """DELAY: it takes so many seconds longer. DROP: nobody does it, or nobody hears that it was done. PARTIAL: it stops
    half-way. ALLOC: there is no memory for it, or no room on the disk. FLIP: a bit of what is read has changed."""

    DELAY = "delay"
    DROP = "drop"
    PARTIAL = "partial"
    ALLOC = "alloc"
    FLIP = "flip"


KINDS = {
    Point.STORE_CALL: (Kind.DELAY, Kind.DROP),
    Point.TRANSFER: (Kind.DELAY, Kind.DROP, Kind.PARTIAL),
    Point.ARENA_WRITE: (Kind.DELAY, Kind.PARTIAL),
    Point.ARENA_READ: (Kind.DELAY, Kind.FLIP),
    Point.INDEX: (Kind.DELAY, Kind.DROP, Kind.ALLOC),
    Point.PROMPT: (Kind.DELAY, Kind.ALLOC),
    Point.STEP: (Kind.DELAY, Kind.ALLOC),
    Point.DISK_WRITE: (Kind.DELAY, Kind.PARTIAL, Kind.ALLOC),
    Point.DISK_READ: (Kind.DELAY, Kind.FLIP),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """rate: share of the times at which it strikes. seconds: of a delay."""

    point: Point
    kind: Kind
    rate: float
    seconds: float = DEFAULT_DELAY_SECONDS


class Faults:
    """Decides at each point, and for each name there, by draws of its own, so that what one is asked changes nothing at
    another. Thread-safe; falsy where there is none. `faults`: those that may strike; `struck`: how often each did."""

    def __init__(
        self, faults: tuple[Fault, ...] = (), seed: int = 0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.faults = faults
        self._sleep = sleep
        self._seed = seed
        self._draws: dict[tuple[Point, str], random.Random] = {}
        self._lock = threading.Lock()
        self.struck: Counter[Fault] = Counter()

    def __bool__(self) -> bool:
        return bool(self.faults)

    def __str__(self) -> str:
        return ", ".join(f"{each.point}:{each.kind}:{each.rate:g}" for each in self.faults)

    @property
    def can_flip(self) -> bool:
        """Whether bits of the arena may flip."""
        return any(fault.kind is Kind.FLIP and fault.point is Point.ARENA_READ for fault in self.faults)

    def end(self) -> None:
        """Nothing strikes any more."""
        self.faults = ()

    def strike(self, point: Point, name: str = "") -> Kind | None:
        """What goes wrong this time; None: nothing. A delay is over when this returns."""
        with self._lock:
            draw = self._draw(point, name).random()
            found = None
            for fault in self.faults:
                if fault.point is point and (draw := draw - fault.rate) < 0:
                    found = fault
                    self.struck[fault] += 1
                    break
        if found is None:
            return None
        if found.kind is Kind.DELAY:
            self._sleep(found.seconds)
            return None
        return found.kind

    def choose(self, point: Point, count: int, name: str = "") -> int:
        """One of so many, by the draws of this point."""
        with self._lock:
            return self._draw(point, name).randrange(count)

    def _draw(self, point: Point, name: str) -> random.Random:
        if (point, name) not in self._draws:
            self._draws[point, name] = random.Random(f"{self._seed} {point} {name}")
        return self._draws[point, name]


def faults_text(text: str) -> str:
    """The text, if `read_faults` reads it. Raises ValueError."""
    read_faults(text)
    return text


def read_faults(text: str) -> Faults:
    """From `POINT:KIND:RATE[:SECONDS]` with commas between, and `seed=N`. Raises ValueError."""
    faults: list[Fault] = []
    seed = 0
    for item in filter(None, (part.strip() for part in text.split(","))):
        if item.startswith("seed=") and item[5:].isdigit():
            seed = int(item[5:])
            continue
        match = _ITEM.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is not POINT:KIND:RATE[:SECONDS], nor seed=N")
        try:
            point = Point(match[1])
        except ValueError:
            raise ValueError(f"{match[1]!r} is none of {', '.join(Point)}") from None
        if match[2] not in KINDS[point]:
            raise ValueError(f"{match[2]!r} is none of {', '.join(KINDS[point])}, which {point} has")
        rate, seconds = float(match[3]), float(match[4] or DEFAULT_DELAY_SECONDS)
        if not 0 < rate <= 1 or not 0 <= seconds <= MOST_DELAY_SECONDS:
            raise ValueError(
                f"{item!r}: a rate is above 0 and at most 1, a delay at most {MOST_DELAY_SECONDS:g} s"
            )
        faults.append(Fault(point, Kind(match[2]), rate, seconds))
    for point in Point:
        if sum(fault.rate for fault in faults if fault.point is point) > 1:
            raise ValueError(f"the rates at {point} are more than 1 together")
    return Faults(tuple(faults), seed)


@dataclass(frozen=True, kw_only=True)
class FaultOptions:
    """What goes wrong on purpose."""

    faults: str = option(
        "",
        "faults on purpose, to try what they cost: POINT:KIND:RATE[:SECONDS] with commas between, and seed=N",
        parse=faults_text,
        metavar="FAULTS",
    )
