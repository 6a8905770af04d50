"""The package's version."""

from __future__ import annotations

from importlib import metadata


def package_version() -> str:
    """The installed version; "unknown" when the source is run without being installed."""
    try:
        return metadata.version("carrel")
    except metadata.PackageNotFoundError:
        return "unknown"
