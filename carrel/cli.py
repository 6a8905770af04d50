"""The `carrel` command: finds the command and runs it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from carrel.commands import COMMANDS
from carrel.errors import CarrelError
from carrel.process.command_line import Parser
from carrel.process.options import OptionError, did_you_mean
from carrel.process.version import version
from carrel.serve.elsewhere import remedies


def build_parser(arguments: Sequence[str]) -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """The parser for `arguments`, and the commands' by name. Only the module of the command they name is imported."""
    parser = Parser(
        prog="carrel",
        description="Serve long-context language models with the whole KV cache recallable from host memory.",
    )
    parser.add_argument("--version", action="version", version=f"carrel {version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.summary, description=command.summary)
        if name in arguments:
            import_module(command.module).add_arguments(subparser)
    return parser, dict(subparsers.choices)


def _meant(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    flags = re.findall(r"^  (--[a-z-]+)", parser.format_help(), re.MULTILINE)
    for word in unknown:
        if meant := did_you_mean(word.partition("=")[0], flags):
            return meant
    return f"; carrel {parser.prog.split()[-1]} --help lists what there is"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` leaves out the program's name."""
    argv = sys.argv[1:] if argv is None else argv
    parser, commands = build_parser(argv)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        # by the command's own parser, so that its own usage is shown
        words, parser_of = " ".join(unknown), commands[arguments.command]
        found = remedies(unknown) if arguments.command == "serve" else ""
        parser_of.error(f"unknown: {words}{found or _meant(parser_of, unknown)}")
    try:
        return int(import_module(COMMANDS[arguments.command].module).run(arguments))
    except (CarrelError, OptionError) as error:
        print(f"carrel {arguments.command}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
