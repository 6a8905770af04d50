"""The committed results, read back into the records they were written from."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.figures import revive
from benchmarks.report import RESULTS
from carrel.evaluation.fidelity.report import FidelityReport, read_fidelity
from carrel.evaluation.record import CellResult, Report, read_report

R = TypeVar("R")


def content(name: str) -> dict[str, Any]:
    """The JSON of benchmarks/results/NAME.json."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def rows(kind: type[R], *names: str) -> list[R]:
    """The rows of these results of `carrel bench`, one file after the other."""
    return [revive(kind, fields) for name in names for fields in content(name)["rows"]]


def matching(pattern: str) -> list[str]:
    """Names of committed results, sorted."""
    return sorted(path.stem for path in RESULTS.glob(f"{pattern}.json"))


def report(name: str) -> Report:
    """Of `carrel eval`. A page asks for some of them hundreds of times."""
    path = RESULTS / f"{name}.json"
    return _report(path, path.stat().st_mtime_ns)


@cache
def _report(path: Path, _written_ns: int) -> Report:
    return read_report(path)


def fidelity(name: str) -> FidelityReport:
    """Of `carrel eval --fidelity`."""
    return read_fidelity(RESULTS / f"{name}.json")


def results(*names: str) -> list[CellResult]:
    """The cells of these reports of `carrel eval`. A cell that stands in several is that of the last."""
    cells = {result.cell: result for name in names for result in report(name).results()}
    return list(cells.values())
