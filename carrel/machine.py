"""Installed packages, and the machine that they run on."""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from carrel.errors import CarrelError

GPU_TIMEOUT_S = 20.0


class MissingLibraryError(CarrelError):
    """A library that a command needs is not installed."""


def require(what: str, libraries: Iterable[str], package: str) -> None:
    """Raise MissingLibraryError where `what` needs a library that is not installed. package: for pip."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingLibraryError(f"{what} needs {', '.join(missing)}: pip install {package}")


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None for another."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def file_text(path: str) -> str:
    """Return a small file's text; empty where it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def cpu_name() -> str:
    model = re.search(r"^model name\s*: (.*)$", file_text("/proc/cpuinfo"), re.MULTILINE)
    return model[1] if model else platform.machine()


def gpus(fields: str, timeout_s: float = GPU_TIMEOUT_S) -> list[str]:
    """Return these fields of nvidia-smi with commas between, of each GPU; empty where it finds none or is too slow."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.splitlines()
