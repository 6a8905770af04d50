"""Checks of Python and of the packages that each process needs, against what the installed Carrel declares."""

from __future__ import annotations

import operator
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

from carrel.doctor.finding import Finding, Start, State
from carrel.doctor.programs import run_python
from carrel.machine import version_of

_REQUIREMENT = re.compile(r'([\w.-]+)(?:\[([\w,-]+)\])?([^;]*)(?:;.*extra == "([\w-]+)")?')
_BOUND = re.compile(r"(>=|<|==)([\d.]+)")
COMPARED = {">=": operator.ge, "<": operator.lt, "==": operator.eq}


@dataclass(frozen=True)
class Process:
    """extra: of the package, with all that the process needs. imports: those that load native code."""

    name: str
    extra: str
    imports: tuple[str, ...] = ()


# the worker's own are imported by the check of its devices
PROCESSES = (
    Process("command", "cli"),
    Process("gateway", "gateway", ("fastapi", "uvicorn", "tokenizers")),
    Process("worker", "gpu-worker"),
    Process("store", "kv-store", ("faiss", "ray")),
)


def check_packages(_: Start) -> Iterator[Finding]:
    """Check versions by the package's metadata, then import what may be installed and broken."""
    try:
        declared = metadata.requires("carrel") or []
        python = metadata.metadata("carrel")["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        text = "Carrel is not installed here, so versions cannot be compared"
        yield Finding(State.WARNING, "packages", text, "pip install -e '.[all]'")
        return
    yield _python(platform.python_version(), python)
    for process in PROCESSES:
        yield check_process(process, declared)


def check_process(process: Process, declared: Sequence[str]) -> Finding:
    """Check one process. declared: the requirements of all extras, as a package's metadata has them."""
    subject, remedy = f"packages: {process.name}", f"pip install -U 'carrel[{process.extra}]'"
    needed = dict(requirements(process.extra, declared))
    found = {package: version_of(package) or "" for package in needed}
    wrong = [
        f"{package} {found[package] or 'is missing'} ({bounds} is needed)"
        for package, bounds in needed.items()
        if not is_within(found[package], bounds)
    ]
    if wrong:
        return Finding(State.PROBLEM, subject, ", ".join(wrong), remedy)
    if process.imports:
        ended = run_python("-c", f"import {', '.join(process.imports)}")
        if ended.code:
            state = State.WARNING if ended.timed_out else State.PROBLEM
            return Finding(state, subject, f"import {', '.join(process.imports)}: {ended.error}", remedy)
    return Finding(State.OK, subject, ", ".join(f"{name} {version}" for name, version in found.items()))


def requirements(extra: str, declared: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each package that `extra` needs, those of extras within it included, with its bounds."""
    for line in declared:
        match = _REQUIREMENT.match(line)
        if match is None or match[4] != extra:
            continue
        if match[1] != "carrel":
            yield match[1], match[3].strip()
            continue
        for inner in match[2].split(","):
            yield from requirements(inner, declared)


def is_within(version: str, bounds: str) -> bool:
    """Return whether an installed version, empty for none, satisfies bounds of >=, < and ==."""
    return bool(version) and all(
        COMPARED[how](_numbers(version), _numbers(bound)) for how, bound in _BOUND.findall(bounds)
    )


def _numbers(version: str) -> list[int]:
    """Return a release's numbers, without zeros at the end and without what is behind them, such as `rc1` or `+cpu`."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(each) for each in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def _python(version: str, bounds: str) -> Finding:
    if is_within(version, bounds):
        return Finding(State.OK, "python", version)
    return Finding(
        State.PROBLEM, "python", f"{version} ({bounds} is needed)", "make setup PYTHON=/path/to/python3.11"
    )
