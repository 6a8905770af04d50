"""Options as command-line arguments. Absent ones stay absent, so that the layers below them count."""

from __future__ import annotations

import argparse
from typing import Any

from carrel.serve.flags import Flag


def add_flag(parser: argparse.ArgumentParser, name: str, item: Flag, default: Any) -> None:
    """The long flag of one option, its other spellings too; its value arrives as text under `name`."""
    shown = item.help if default is None else f"{item.help} (default: {default})"
    spelled = [f"--{spelling.replace('_', '-')}" for spelling in (name, *item.aliases)]
    if item.is_switch:
        parser.add_argument(
            *spelled, dest=name, action="store_const", const="true", help=item.help, default=argparse.SUPPRESS
        )
        return
    parser.add_argument(*spelled, dest=name, metavar=item.metavar, help=shown, default=argparse.SUPPRESS)


def add_model(parser: argparse.ArgumentParser, item: Flag) -> None:
    """The model, which comes without a flag."""
    parser.add_argument("model", nargs="?", metavar=item.metavar, help=item.help, default=argparse.SUPPRESS)
