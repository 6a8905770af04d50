"""Version and commit of this installation."""

from __future__ import annotations

import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def version() -> str:
    """The version in pyproject.toml, read from a checkout or else from the installed package."""
    project = CHECKOUT / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text())["project"]["version"])
    return metadata.version("carrel")


def commit() -> str:
    """Short commit of the checkout; "unknown" outside one or without git."""
    if not (CHECKOUT / ".git").exists():
        return "unknown"
    try:
        found = subprocess.run(
            ["git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()
