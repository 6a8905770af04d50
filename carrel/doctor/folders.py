"""Checks of folders that a start writes to."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from carrel.doctor.finding import GIB, Finding, Start, State

LEAST_FREE_BYTES = 1 * GIB


def check_folders(start: Start) -> Iterator[Finding]:
    """Check the folders of the hub's weights and of temporary files."""
    yield check_folder("weights", weights_folder(start.home), State.WARNING, "set HF_HUB_CACHE")
    yield check_folder("temporary files", Path(tempfile.gettempdir()), State.PROBLEM, "set TMPDIR")


def check_folder(subject: str, folder: Path, unwritable: State, remedy: str) -> Finding:
    """Check that a folder, or the nearest one above it that exists, can be written to and has space.

    unwritable: the state if not. remedy: how to name another folder.
    """
    above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        return Finding(unwritable, subject, f"{folder} cannot be written to", remedy)
    free = shutil.disk_usage(above).free
    text = f"{folder}: {free / GIB:.1f} GiB are free"
    if free < LEAST_FREE_BYTES:
        return Finding(State.WARNING, subject, text, f"delete files there, or {remedy}")
    return Finding(State.OK, subject, text)


def weights_folder(home: Path) -> Path:
    """Return the folder where models of the hub are kept."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(caches, "huggingface")) / "hub"
