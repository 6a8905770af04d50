"""`carrel doctor`: checks what a start needs, and says what to change."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from carrel.doctor.devices import check_devices
from carrel.doctor.finding import Finding, Start, State, worst
from carrel.doctor.folders import check_folders
from carrel.doctor.host import check_host
from carrel.doctor.packages import check_packages
from carrel.process.settings import read
from carrel.process.version import version
from carrel.serve.options import ServeOptions

CHECKS: tuple[Callable[[Start], Iterable[Finding]], ...] = (
    check_packages,
    check_devices,
    check_host,
    check_folders,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of options, as carrel serve would read it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Returns 1 if one is a problem; raises OptionError for options that cannot be used."""
    start = Start(read(ServeOptions, {"config": arguments.config} if arguments.config else {}), Path.home())
    findings = examine(start)
    for line in lines(findings):
        print(line)
    if arguments.json is not None:
        rows = {"version": version(), "findings": [asdict(each) for each in findings]}
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(worst(findings) is State.PROBLEM)


def examine(start: Start) -> list[Finding]:
    """Run all checks side by side, since most wait for a program, and return the findings in order."""
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        return [finding for found in pool.map(lambda check: list(check(start)), CHECKS) for finding in found]


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return the report: a line for each finding, its remedy below it, and the counts."""
    width = max(len(each.subject) for each in findings)
    found = []
    for each in findings:
        found.append(f"{each.state:<8} {each.subject:<{width}}  {each.text}")
        if each.remedy:
            found.append(f"{'':<8} {'':<{width}}  > {each.remedy}")
    counts = [sum(each.state is state for each in findings) for state in (State.PROBLEM, State.WARNING)]
    return [*found, f"problems: {counts[0]}, warnings: {counts[1]}"]
