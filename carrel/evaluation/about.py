"""The provenance of a measurement: versions, machine, and hashes of what was measured; and its file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from carrel.errors import EvaluationError
from carrel.machine import cpu_name, gpus, version_of
from carrel.process.version import commit, version

T = TypeVar("T")
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "faiss-cpu", "grpcio", "ray")


def describe(device: str) -> dict[str, Any]:
    """Versions, machine, command line and time, for the reader of a report. `device` as the worker names it."""
    versions = {"carrel": version(), "commit": commit(), "python": platform.python_version()}
    versions |= {package: found for package in PACKAGES if (found := version_of(package))}
    return {
        "versions": versions,
        "machine": machine(device),
        "command": shlex.join(["carrel", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def of_both(about: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The provenance of what two runs measured: the first's, with the commits of both."""
    commits = [name for each in (about, other) for name in each["versions"]["commit"].split(", ")]
    return {**about, "versions": {**about["versions"], "commit": ", ".join(dict.fromkeys(commits))}}


def machine(device: str) -> dict[str, Any]:
    """Processor, cores that this process may use, memory, and the GPU when `device` is one."""
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
    }
    if device.startswith("cuda"):
        found["gpu"] = next(iter(gpus("name")), "unknown")
    return found


def write_whole(path: Path, text: str) -> None:
    """In one step: an interrupted write leaves the old file. Folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def read_json(path: Path, number: int, what: str, build: Callable[[dict[str, Any]], T]) -> T:
    """Return what `build` makes of a JSON file of format `number`. Raises EvaluationError on any other file."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != number:
            raise EvaluationError(f"{path} has format {content['format']}; this version reads {number}")
        return build(content)
    except OSError as exc:
        raise EvaluationError(f"cannot read {path}: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise EvaluationError(f"{path} is no {what}: {exc}") from exc


def hash_files(paths: Iterable[Path]) -> str:
    """SHA-256 over names and contents, in the order of the names. Raises OSError."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        with path.open("rb") as file:
            total.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def model_files(model: Path) -> list[Path]:
    """The files of a model directory that decide what it answers; a model of one file is that."""
    if model.is_file():
        return [model]
    return [*model.glob("*.safetensors"), model / "config.json", model / "tokenizer.json"]
