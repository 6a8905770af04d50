"""`python -m benchmarks.report [FILE...]`: the committed results as Markdown."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import decode_rows, quality_plot, soak_plot, tables
from benchmarks.commands import COMMANDS, module_of
from benchmarks.figures import revive
from benchmarks.load.soak_row import SoakRow
from benchmarks.tables import Column
from carrel.evaluation.fidelity.report import markdown, read_fidelity
from carrel.evaluation.record import read_report
from carrel.evaluation.table import markdown_table, verdicts

RESULTS = Path(__file__).resolve().parent / "results"

CPU_COLUMNS: tuple[Column[dict[str, Any]], ...] = (
    Column("length", lambda row: str(row["length"])),
    Column("rival", lambda row: row["rival"], False),
    Column("n", lambda row: str(row["n"])),
    Column("first token, ms", lambda row: _with_range(row["ttft_ms"], row["ttft_range_ms"], 0)),
    Column("ratio", lambda row: tables.number(row.get("ttft_ratio"), 2)),
    Column("second token, ms", lambda row: f"{row['second_token_ms']:.1f}"),
    Column("decode step, ms", lambda row: _with_range(row["step_ms"], row["step_range_ms"], 2)),
    Column("ratio", lambda row: tables.number(row.get("step_ratio"), 2)),
    Column("peak memory, MiB", lambda row: f"{row['peak_mib']:.0f}"),
    Column("ratio", lambda row: tables.number(row.get("peak_ratio"), 2)),
    Column("same answers", lambda row: tables.number(row.get("same_answers"), 2)),
)


def render(path: Path) -> str:
    """Markdown of one result file, whichever kind it is; some have no table of their own."""
    content = json.loads(path.read_text())
    parts = [f"### {path.stem}"]
    if "about" in content:
        parts.append(provenance(content["about"]))
    if "fidelity" in content:
        parts.append(markdown(read_fidelity(path).rows()))
    elif content.get("benchmark") in COMMANDS:
        parts.append(import_module(module_of(content["benchmark"])).render(content))
    elif "cells" in content:
        parts.append(quality_tables(path))
    elif "timings" in content:
        parts.append(cpu_tables(content))
    return "\n\n".join(parts) + "\n"


def quality_tables(path: Path) -> str:
    """The quality table, and the targets below it."""
    results = read_report(path).results()
    met = [f"- {verdict}" for verdict in verdicts(results)]
    return "\n\n".join(part for part in (markdown_table(results), "\n".join(met)) if part)


def cpu_tables(content: dict[str, Any]) -> str:
    """Times, memory and their ratios to the baseline, and the targets below."""
    return "\n".join([cpu_table(content), "", *_targets(content)])


def cpu_table(content: dict[str, Any]) -> str:
    return tables.markdown(CPU_COLUMNS, sorted(content["timings"], key=lambda row: row["length"]))


def provenance(about: dict[str, Any]) -> str:
    """One paragraph: command, machine, versions, date."""
    machine = about["machine"]
    driver = f"driver {machine['driver']}" if machine.get("driver") else None
    where = [
        machine.get("gpu"),
        driver,
        machine["cpu"],
        f"{machine['cores']} cores",
        f"{machine['memory_gib']} GiB",
    ]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return f"`{about['command']}` on {', '.join(filter(None, where))}; {versions}; {about['date']}."


def _targets(content: dict[str, Any]) -> Iterable[str]:
    for row in content["timings"]:
        if row["rival"] != "carrel full" or row["length"] != 4096 or "ttft_ratio" not in row:
            continue
        for key, what in (("ttft", "first token"), ("step", "dense decode step")):
            ratio, most = row[f"{key}_ratio"], content["targets"][key]
            met = "met" if ratio <= most else "MISSED"
            yield f"- {what} at 4K: {ratio:.2f} of {content['baseline']} (target: at most {most}): {met}"


def _with_range(value: float, between: Sequence[float], digits: int) -> str:
    return f"{value:.{digits}f} ({between[0]:.{digits}f}-{between[1]:.{digits}f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="default: all in benchmarks/results"
    )
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw the decode, quality and soak results among them"
    )
    options = parser.parse_args(argv)
    for path in options.files or sorted(RESULTS.glob("*.json")):
        print(render(path))
        content = json.loads(path.read_text())
        if options.plots and content.get("benchmark") == "decode":
            decode_rows.draw([revive(decode_rows.DecodeRow, row) for row in content["rows"]], options.plots)
        if options.plots and content.get("benchmark") == "soak":
            for row in content["rows"]:
                soak_plot.draw(revive(SoakRow, row), options.plots)
        if options.plots and "cells" in content:
            quality_plot.draw(read_report(path).results(), options.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
