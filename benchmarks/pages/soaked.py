"""Tables of the soak with faults, and of the siege."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks import tables
from benchmarks.commands.siege import COLUMNS, notes
from benchmarks.load.fits import Slope
from benchmarks.load.processes import ALL, ARENA, DESCRIPTORS, OWN_MIB, STORE
from benchmarks.load.siege import SiegeRow
from benchmarks.load.soak_row import SoakRow, Struck, Waits
from benchmarks.pages.sources import rows
from benchmarks.tables import Column

SOAK, ON_GPU, SIEGE = "soak_faults_cpu", "soak_faults_smollm2_h200", "siege_cpu"
MIB = 2**20
# The process that has the arena is the store to whoever uses it.
NAMES = {ARENA: "store"}
OWNERS = {ARENA: "store's actor", STORE: "store's starter", ALL: "all processes"}


@dataclass(frozen=True)
class Kind:
    """All faults of one kind."""

    name: str
    faults: tuple[Struck, ...]


def faults() -> str:
    """What each kind of fault cost in an hour on a CPU."""
    return _faults(SOAK)


def faults_on_gpu() -> str:
    """The same of ten minutes on a GPU."""
    return _faults(ON_GPU)


def _faults(source: str) -> str:
    (row,) = rows(SoakRow, source)
    kinds = dict.fromkeys((fault.who, fault.how) for fault in row.faults)
    found = [
        Kind(f"{NAMES.get(who, who)} {how}", tuple(f for f in row.faults if (f.who, f.how) == (who, how)))
        for who, how in kinds
    ]
    columns: list[Column[Kind]] = [
        Column("fault", lambda kind: kind.name, False),
        Column("times", lambda kind: str(len(kind.faults))),
        Column("all serve after, median (most)", lambda kind: _recovery(kind.faults)),
        Column("errors a fault", lambda kind: f"{median(fault.num_ended for fault in kind.faults):.0f}"),
        Column("p99 of the first token before", lambda kind: _p99(fault.before for fault in kind.faults)),
        Column("during", lambda kind: _p99(fault.during for fault in kind.faults)),
        Column("after", lambda kind: _p99(fault.after for fault in kind.faults)),
    ]
    return tables.markdown(columns, found)


def siege() -> str:
    """What an honest client waited, and what the others got."""
    found = rows(SiegeRow, SIEGE)
    # what was held is in the last column
    told = [
        f"run {number}: {line}"
        for number, row in enumerate(found, start=1)
        for line in notes(row)
        if not any(line.startswith(f"{name}:") for name in row.gauges)
    ]
    return tables.markdown(COLUMNS, found, told)


def growth() -> str:
    """What was watched, and its slope."""
    (row,) = rows(SoakRow, SOAK)
    columns: list[Column[Slope]] = [
        Column("gauge", lambda slope: _name(slope.name), False),
        Column("level", lambda slope: f"{_scaled(slope.name, slope.level):,.1f}"),
        Column("growth an hour", lambda slope: f"{_scaled(slope.name, slope.per_hour):+,.1f}"),
        Column("standard error", lambda slope: _error(slope)),
        Column("looks", lambda slope: str(slope.num_points)),
        Column("lives", lambda slope: str(slope.num_lives)),
    ]
    return tables.markdown(columns, row.slopes)


def _name(name: str) -> str:
    """Ray's actor has the arena; the store's own process starts it."""
    owner, _, what = name.partition(" ")
    if what in (OWN_MIB, DESCRIPTORS):
        return f"{OWNERS.get(owner, owner)}: {what}"
    return name.replace("_bytes", " MiB").replace("num_", "").replace("_", " ")


def _scaled(name: str, value: float) -> float:
    return value / MIB if name.endswith("_bytes") else value


def _error(slope: Slope) -> str:
    return "-" if slope.error is None else f"{_scaled(slope.name, slope.error):,.1f}"


def _recovery(found: Sequence[Struck]) -> str:
    seconds = [fault.ready_s - fault.at_s for fault in found if fault.ready_s is not None]
    late = f", {len(found) - len(seconds)} not in 110 s" if len(seconds) < len(found) else ""
    return f"{median(seconds):.0f} s ({max(seconds):.0f} s){late}" if seconds else "-"


def _p99(found: Iterable[Waits | None]) -> str:
    """The median over the faults."""
    known = [waits.p99_s for waits in found if waits is not None]
    return f"{median(known):.1f} s" if known else "-"
