"""Answer quality against the memory that it takes, out of a report of `carrel eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import plots
from carrel.evaluation.cells import WRAPPED, budget_name, length_name
from carrel.evaluation.record import CellResult

MIB = 2**20
# The family of a policy that this version does not have. It sorts behind the others, whose hues stay.
UNKNOWN = "unknown"


def draw(results: Sequence[CellResult], folder: Path) -> None:
    """A picture for each task, length and protocol; a panel for each budget, and `full` in all of them.

    Leaves out what an older report does not know the memory of.
    """
    families = _families()
    known = [result for result in results if result.device_bytes]
    for asked in dict.fromkeys(_asked(result) for result in known):
        of_asked = [result for result in known if _asked(result) == asked]
        spots = {
            result.cell: plots.Spot(
                result.cell.policy,
                families.get(result.cell.policy.partition(WRAPPED)[0], UNKNOWN),
                (result.device_bytes or 0.0) / MIB,
                result.exact_match,
                result.low,
                result.high,
            )
            for result in of_asked
        }
        everywhere = [spot for cell, spot in spots.items() if cell.budget is None]
        panels = {
            f"budget {budget_name(budget)}": [
                *everywhere,
                *(spot for cell, spot in spots.items() if cell.budget == budget),
            ]
            for budget in dict.fromkeys(cell.budget for cell in spots)
            if budget is not None
        }
        task, length, protocol = asked
        plots.panels(
            folder / f"quality_{task}_{length_name(length)}_{protocol}.png",
            "GPU memory that a request holds, MiB (lines at the bottom: exact; equal ones are drawn side by side)",
            "exact match",
            panels,
        )


def _asked(result: CellResult) -> tuple[str, int, str]:
    return result.cell.task, result.cell.length, result.cell.protocol


def _families() -> dict[str, str]:
    # here, as it loads torch: tables need none
    from gpu_worker.policies.registry import registry

    return {name: policy.family.value for name, policy in registry().items()}
