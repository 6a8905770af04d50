"""docs/quality.md: the least budget at which each policy answers as well as `full`, beside a step's time."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import tables
from benchmarks.pages import step_times
from benchmarks.pages.comparison import MIB, NOTHING
from benchmarks.pages.joined import Joined, Line, joined
from benchmarks.tables import Column
from carrel.evaluation.cells import UNBUDGETED, budget_name

# Less than this below `full`, in score, is as good.
MARGIN = 0.02
TASKS = {"smollm2": ("SmolLM2", "niah_single_2"), "nano": ("carrel-nano", "mixed")}
STEP_AT = (32768, 24)


def table() -> str:
    """A line for each policy that was asked, the least budget of each model and protocol."""
    asked = {
        model: joined(f"quality_{model}_*").only(lambda cell, task=task: cell.task == task).told()
        for model, (_, task) in TASKS.items()
    }
    policies = sorted({line.policy for found in asked.values() for line in found.lines()} - {UNBUDGETED})
    if not policies:
        return NOTHING
    columns: list[Column[str]] = [Column("policy", lambda policy: f"`{policy}`", False)]
    for model, (name, _) in TASKS.items():
        columns += [Column(f"{name}, {p}", _least(asked[model], p)) for p in ("P1", "P2")]
    held = joined("bytes_smollm2*")
    if held.cells:
        columns.append(Column("GPU MiB, n/10", lambda policy: _held(held, policy)))
    steps = step_times.measured()
    columns.append(Column("step, x `full`", lambda policy: step_times.faster(steps, policy, STEP_AT)))
    return tables.markdown(columns, policies)


def _least(found: Joined, protocol: str) -> Callable[[str], str]:
    """The least budget from which on, among those asked, a policy is as good as `full`."""
    of_protocol = found.only(lambda cell: cell.protocol == protocol)

    def text(policy: str) -> str:
        lines = [line for line in of_protocol.lines() if line.policy == policy]
        if not lines:
            return ""
        shown = ""
        for line in lines:
            mean = of_protocol.against_full(line, of_protocol.places())
            if mean is None:
                break
            if mean.value < -MARGIN:
                # Every budget that was asked, where none is enough, is too small.
                return shown or f"above {budget_name(line.budget)} ({mean.value:+.2f})"
            shown = f"{budget_name(line.budget)} ({mean.value:+.3f})"
        return shown

    return text


def _held(held: Joined, policy: str) -> str:
    mean = held.mean(Line(policy, 0.1), lambda outcome: outcome.device_bytes)
    return "-" if mean is None else f"{mean / MIB:.1f}"
