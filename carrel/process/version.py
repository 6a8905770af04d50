"""Version, commit and edition of a process. Processes of different editions refuse each other."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
REMEDY = "install one version for both and restart both (docs/deployment.md, Upgrading)"
_DIGEST_BYTES = 4


@functools.cache
def version() -> str:
    """The version in pyproject.toml, from a checkout or else the installed package; "unknown" without both."""
    project = CHECKOUT / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text())["project"]["version"])
    try:
        return metadata.version("carrel")
    except metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def commit(checkout: Path = CHECKOUT) -> str:
    """Short commit of a checkout, with "-dirty" behind it where files that git knows are others than the commit's;
    "unknown" without a git folder of its own or without git."""
    folder = ("--git-dir", str(checkout / ".git"), "--work-tree", str(checkout))
    try:
        found = subprocess.run(
            # A tag is not asked for: none matches.
            ["git", *folder, "describe", "--always", "--exclude=*", "--dirty"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


@dataclass(frozen=True, slots=True)
class Edition:
    """Carrel's version, and a digest of the messages, which tells two checkouts of one version apart."""

    version: str
    messages: str

    def __str__(self) -> str:
        if not self.version and not self.messages:
            return "of a version that does not tell its name"
        return f"Carrel {self.version} (messages {self.messages})"

    def refusal(self, own_name: str, other_name: str, other: Edition) -> str | None:
        """Why we, of this edition, must not talk to that other; None where we may."""
        if self == other:
            return None
        return f"{own_name} is {self}, {other_name} is {other}: {REMEDY}"


@functools.cache
def edition_of(messages: bytes) -> Edition:
    """This process's edition, for what talks by these messages: a proto file's serialized descriptor."""
    return Edition(version(), hashlib.blake2b(messages, digest_size=_DIGEST_BYTES).hexdigest())
