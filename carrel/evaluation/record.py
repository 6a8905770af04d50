"""The records of an evaluation run: outcomes of single documents, the cells' results, and their provenance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from carrel.errors import EvaluationError
from carrel.evaluation.about import of_both, read_json, write_whole
from carrel.evaluation.cells import UNBUDGETED, Cell
from carrel.evaluation.scoring import Mean, Rate, bootstrap, mean, paired

FORMAT = 1
# What a result has the means of, by its outcomes' names.
MEANS = (
    *(
        "attention_mass",
        "recall_rate",
        "best_recall",
        "budget_tokens",
        "attended_tokens",
        "window_tokens",
        "hit_rate",
    ),
    *("bytes_moved", "offloaded_tokens", "prefill_ms", "device_bytes", "host_bytes"),
)


@dataclass(frozen=True)
class Outcome:
    """One document's answer under one cell, with what its request cost. Milliseconds and bytes as the worker says.

    `attention_mass` and `recall_rate` are None where the worker measured nothing, as under `full`; the last six in
    reports from before they were kept. is_measured: whether they were asked for. score: the share of the
    wanted answers that it contains; is_correct: whether it is right as the task counts whole answers.
    """

    index: int
    kind: str
    is_correct: bool
    prediction: str
    prompt_tokens: int
    completion_tokens: int
    budget_tokens: int
    attended_tokens: float
    window_tokens: float
    hit_rate: float
    bytes_moved: int
    offloaded_tokens: int
    attention_mass: float | None
    recall_rate: float | None
    prefill_ms: float
    index_wait_ms: float
    decode_ms: float
    decode_steps: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    is_measured: bool | None = None
    score: float | None = None
    best_recall: float | None = None


@dataclass(frozen=True)
class Source:
    """Conditions that every outcome of a report depends on: reports of different sources cannot be continued or merged.

    is_measured: whether attention mass and recall rate are measured, be it for some documents only. index_device: None
    where it was not said. calibration_sha256: of the worker's calibration file, where it was given one. is_chat: asked
    in the model's chat template. books_sha256: of the texts, "" where sentences were invented. The last four: as they
    were given to the worker, if they were.
    """

    model_sha256: str
    books_sha256: str
    seed: int
    device: str
    dtype: str
    hot_cache: str
    is_measured: bool = True
    index_device: str | None = None
    calibration_sha256: str | None = None
    is_chat: bool = False
    policy_options: str | None = None
    full_layers: str | None = None
    granularity: str | None = None
    outlier_share: str | None = None


@dataclass(frozen=True)
class CellResult:
    """Means over the documents of a cell; the share of exact matches with its 95 % Wilson interval, and the score with
    its bootstrap interval. num_measured: the documents that `attention_mass` and `recall_rate` are means of.

    The medians are for comparing times: the first documents of a cell may wait for a kernel to be compiled. None where
    measuring slowed what was timed.
    """

    cell: Cell
    n: int
    exact_match: float
    low: float
    high: float
    num_measured: int
    attention_mass: float | None
    recall_rate: float | None
    budget_tokens: float
    attended_tokens: float
    window_tokens: float
    hit_rate: float
    bytes_moved: float
    offloaded_tokens: float
    prefill_ms: float
    decode_ms_per_token: float
    median_prefill_ms: float | None
    median_step_ms: float | None
    device_bytes: float | None
    host_bytes: float | None
    score: Mean | None = None
    best_recall: float | None = None


def summarize(cell: Cell, outcomes: Sequence[Outcome], is_measured: bool = True) -> CellResult:
    """The cell's result; `outcomes` holds at least one."""
    rate = Rate(sum(outcome.is_correct for outcome in outcomes), len(outcomes))
    low, high = rate.interval
    # the first token of P1 comes from the prefill, so its decode steps are one fewer: near enough for a mean
    decoded = sum(outcome.completion_tokens for outcome in outcomes)
    return CellResult(
        cell=cell,
        n=len(outcomes),
        exact_match=rate.value,
        low=low,
        high=high,
        num_measured=sum(is_measured if each.is_measured is None else each.is_measured for each in outcomes),
        decode_ms_per_token=sum(outcome.decode_ms for outcome in outcomes) / max(1, decoded),
        median_prefill_ms=None if is_measured else median(outcome.prefill_ms for outcome in outcomes),
        median_step_ms=None if is_measured else _median_step(outcomes),
        score=bootstrap(scores) if (scores := list(_scores(outcomes).values())) else None,
        **{name: mean(getattr(outcome, name) for outcome in outcomes) for name in MEANS},
    )


class Report:
    """All outcomes of a run by cell and document; `about` describes versions, machine and command for a reader."""

    def __init__(self, source: Source, about: dict[str, Any]) -> None:
        self.source = source
        self.about = about
        self._outcomes: dict[Cell, dict[int, Outcome]] = {}

    def expect(self, cells: Iterable[Cell]) -> None:
        """Let these cells come in this order, whichever has an outcome first."""
        for cell in cells:
            self._outcomes.setdefault(cell, {})

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Record one document, in place of an earlier outcome of it."""
        self._outcomes.setdefault(cell, {})[outcome.index] = outcome

    def done(self, cell: Cell) -> frozenset[int]:
        """The documents of `cell` that have an outcome."""
        return frozenset(self._outcomes.get(cell, ()))

    def outcomes(self, cell: Cell) -> list[Outcome]:
        """In the documents' order."""
        return [outcome for _, outcome in sorted(self._outcomes.get(cell, {}).items())]

    def cells(self) -> list[Cell]:
        """Every cell that has an outcome, in the order in which the cells came."""
        return [cell for cell, outcomes in self._outcomes.items() if outcomes]

    def results(self) -> list[CellResult]:
        """Return the results of all cells."""
        return [self.result(cell) for cell in self.cells()]

    def result(self, cell: Cell) -> CellResult:
        """Return the result of a cell that has an outcome."""
        return summarize(cell, self.outcomes(cell), self.source.is_measured)

    def difference(self, cell: Cell, other: Cell) -> Mean | None:
        """How much higher `cell` scores than `other` on the documents that both were asked."""
        return paired(_scores(self.outcomes(cell)), _scores(self.outcomes(other)))

    def merge(self, other: Report) -> None:
        """Take over another run's outcomes. Raises EvaluationError when it measured something else."""
        require_same_source(self.source, other.source)
        self.about = of_both(self.about, other.about)
        self.expect(other._outcomes)
        for cell in other._outcomes:
            for outcome in other.outcomes(cell):
                self.add(cell, outcome)

    def write(self, path: Path) -> None:
        """As JSON, by `write_whole`."""
        cells = []
        for result in self.results():
            rows = [_row(outcome) for outcome in self.outcomes(result.cell)]
            shown = asdict(result)
            against = self.difference(result.cell, replace(result.cell, policy=UNBUDGETED, budget=None))
            shown["against_full"] = asdict(against) if against is not None else None
            cells.append({"cell": shown.pop("cell"), "result": shown, "documents": rows})
        names = [field.name for field in fields(Outcome)]
        content = {
            "format": FORMAT,
            "source": asdict(self.source),
            "about": self.about,
            "document_fields": names,
            "cells": cells,
        }
        write_whole(path, _dump(content))


def read_report(path: Path) -> Report:
    """A report as `Report.write` left it. Raises EvaluationError on any other file."""

    def build(content: dict[str, Any]) -> Report:
        report = Report(Source(**content["source"]), dict(content["about"]))
        for part in content["cells"]:
            cell = Cell(**part["cell"])
            for row in part["documents"]:
                report.add(cell, Outcome(**dict(zip(content["document_fields"], row, strict=True))))
        return report

    return read_json(path, FORMAT, "evaluation report", build)


def require_same_source(ours: Source, theirs: Source) -> None:
    """Raises EvaluationError naming what differs."""
    differing = [
        f"{field.name} ({getattr(theirs, field.name)} there, {getattr(ours, field.name)} here)"
        for field in fields(Source)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    if differing:
        raise EvaluationError(
            f"the report is of another run: {', '.join(differing)}; write to another --json"
        )


def _scores(outcomes: Iterable[Outcome]) -> dict[int, float]:
    """By document, of those that have one."""
    return {outcome.index: outcome.score for outcome in outcomes if outcome.score is not None}


def _row(outcome: Outcome) -> list[Any]:
    values = [getattr(outcome, field.name) for field in fields(Outcome)]
    return [round(value, 4) if isinstance(value, float) else value for value in values]


def _median_step(outcomes: Sequence[Outcome]) -> float | None:
    steps = [outcome.decode_ms / outcome.decode_steps for outcome in outcomes if outcome.decode_steps]
    return median(steps) if steps else None


def _dump(content: dict[str, Any]) -> str:
    """JSON with a line per document, so that a diff of two runs can be read."""
    text = json.dumps({**content, "cells": []}, indent=1, ensure_ascii=False)
    parts = []
    for part in content["cells"]:
        rows = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in part["documents"])
        cell, result = json.dumps(part["cell"]), json.dumps(part["result"])
        parts.append(f'  {{"cell": {cell},\n   "result": {result},\n   "documents": [\n    {rows}]}}')
    return text.replace('"cells": []', '"cells": [\n' + ",\n".join(parts) + "\n ]") + "\n"
