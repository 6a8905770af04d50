"""The `carrel` command: finds the command and runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from carrel.commands import COMMANDS
from carrel.errors import CarrelError
from carrel.process.version import version


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for `arguments`. Only the module of the command they name is imported."""
    parser = argparse.ArgumentParser(
        prog="carrel",
        description="Serve long-context language models with the whole KV cache recallable from host memory.",
    )
    parser.add_argument("--version", action="version", version=f"carrel {version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=command.summary, description=command.summary, allow_abbrev=False
        )
        if name in arguments:
            import_module(command.module).add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` leaves out the program's name."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = build_parser(argv).parse_args(argv)
    try:
        return int(import_module(COMMANDS[arguments.command].module).run(arguments))
    except CarrelError as error:
        print(f"carrel {arguments.command}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
