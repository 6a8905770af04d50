"""The committed results, read back into the records they were written from."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from benchmarks.figures import revive
from benchmarks.report import RESULTS
from carrel.evaluation.record import CellResult, read_report

R = TypeVar("R")


def content(name: str) -> dict[str, Any]:
    """The JSON of benchmarks/results/NAME.json."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def rows(kind: type[R], *names: str) -> list[R]:
    """The rows of these results of `carrel bench`, one file after the other."""
    return [revive(kind, fields) for name in names for fields in content(name)["rows"]]


def results(*names: str) -> list[CellResult]:
    """The cells of these reports of `carrel eval`. A cell that stands in several is that of the last."""
    cells = {
        result.cell: result for name in names for result in read_report(RESULTS / f"{name}.json").results()
    }
    return list(cells.values())
