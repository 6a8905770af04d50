"""`carrel version`."""

from __future__ import annotations

import argparse
import platform

from carrel.process.version import commit, version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(arguments: argparse.Namespace) -> int:
    print(f"carrel {version()} (commit {commit()}, Python {platform.python_version()})")
    return 0
