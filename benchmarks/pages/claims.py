"""What the papers or an earlier page claim, asked again on both models: files `claims_MODEL_NAME_GPU.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import tables
from benchmarks.pages.comparison import NOTHING, difference
from benchmarks.pages.joined import Joined, Line, Place, joined
from benchmarks.pages.sources import matching, report
from benchmarks.tables import Column
from carrel.evaluation.cells import UNBUDGETED, budget_name

MODELS = {"nano": "nano", "smollm2": "SmolLM2"}
PROTOCOLS = ("P1", "P2")


@dataclass(frozen=True)
class Asked:
    """A policy and budget of one experiment, and what its worker was told."""

    name: str
    line: Line
    told: str


def experiments(*names: str) -> Callable[[], str]:
    """The lines of these experiments with scores by model and protocol."""

    def table() -> str:
        asked = list(
            dict.fromkeys(each for name in names for model in MODELS for each in _asked(model, name))
        )
        lines = [each for each in asked if each.line.policy != UNBUDGETED]
        if not lines:
            return NOTHING
        columns: list[Column[Asked]] = [
            Column("policy", lambda each: f"`{each.line.policy}`{each.told}", False),
            Column("budget", lambda each: budget_name(each.line.budget) or "all"),
        ]
        for model, shown in MODELS.items():
            if not any(_asked(model, name) for name in names):
                continue
            columns += [Column(f"{shown}, {each}", _score(model, each)) for each in PROTOCOLS]
            columns.append(Column("against `full`", _against(model)))
            columns.append(
                Column("documents", lambda each, model=model: _of(model, each).num_documents(each.line))
            )
        return tables.markdown(columns, lines)

    return table


def _asked(model: str, name: str) -> list[Asked]:
    files = matching(f"claims_{model}_{name}_*")
    if not files:
        return []
    source = report(files[0]).source
    told = [source.policy_options or ""]
    told += [f"{source.full_layers} layers whole"] if source.full_layers else []
    told += [f"by {source.granularity}"] if source.granularity else []
    told += ["calibrated"] if source.calibration_sha256 and "outliers" not in name else []
    shown = "; ".join(part for part in told if part)
    found = joined(f"claims_{model}_{name}_*")
    return [
        Asked(name, line, "" if line.policy == UNBUDGETED or not shown else f", {shown}")
        for line in found.lines()
    ]


def _score(model: str, protocol: str) -> Callable[[Asked], str]:
    def text(each: Asked) -> str:
        found = _of(model, each)
        scores = [found.score(place, each.line) for place in found.places() if place.protocol == protocol]
        known = [score for score in scores if score is not None]
        return f"{sum(known) / len(known):.2f}" if known else ""

    return text


def _against(model: str) -> Callable[[Asked], str]:
    def text(each: Asked) -> str:
        found = _of(model, each)
        places: list[Place] = found.places()
        return difference(found, each.line, places)

    return text


def _of(model: str, each: Asked) -> Joined:
    """With `full`'s answers to the same questions, whatever run asked them."""
    own = joined(f"claims_{model}_{each.name}_*")
    places = set(own.places())
    everywhere = joined(f"quality_{model}_*")
    full = {
        cell: found
        for cell, found in everywhere.cells.items()
        if cell.policy == UNBUDGETED and Place(cell.task, cell.length, cell.protocol) in places
    }
    return Joined({**full, **own.cells})
