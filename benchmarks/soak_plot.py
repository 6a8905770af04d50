"""A soak with faults as a picture: first tokens and memory over its time, a line at each fault."""

from __future__ import annotations

from pathlib import Path

from benchmarks import plots
from benchmarks.load.processes import ALL, ARENA, GATEWAY, OWN_MIB, SUPERVISOR, WORKER
from benchmarks.load.soak_row import SoakRow

MINUTE_S = 60.0


def draw(row: SoakRow, folder: Path) -> None:
    """Writes soak_faults.png; nothing for a soak without faults."""
    if not row.faults:
        return
    first = [(each.at_s / MINUTE_S, each.first_token) for each in row.bins if each.first_token is not None]
    waits = {
        "median": [(at, waits.median_s) for at, waits in first],
        "most": [(at, waits.most_s) for at, waits in first],
    }
    memory = {
        name: [
            (sample.at_s / MINUTE_S, sample.values[f"{name} {OWN_MIB}"])
            for sample in row.samples
            if f"{name} {OWN_MIB}" in sample.values
        ]
        for name in (ALL, WORKER, GATEWAY, ARENA, SUPERVISOR)
    }
    events = [(fault.at_s / MINUTE_S, f"{fault.who} {fault.how}") for fault in row.faults]
    panels = {"first token, s": waits, "memory of its own, MiB": memory}
    plots.over_time(folder / "soak_faults.png", "minutes", panels, events)
