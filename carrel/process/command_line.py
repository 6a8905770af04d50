"""Command lines from the fields of options, by argparse; and of a process's options, the words that say them.

Not by pydantic-settings: its parser takes an option twice, imports all subcommands, and shows neither variables nor
units in its help.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from carrel.process.options import options_of, share_or_tokens, variable
from carrel.process.removed import removed

CONFIG = "config"


class Parser(argparse.ArgumentParser):
    """Refuses an option that is given twice, and abbreviations."""

    def __init__(self, **how: Any) -> None:
        super().__init__(allow_abbrev=False, **how)
        self.register("action", None, _Once)


class _Once(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = namespace.__dict__.setdefault("_given", set())
        if option_string and self.dest in given:
            parser.error(f"{option_string} is given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


def add_options(parser: argparse.ArgumentParser, kind: type, *, has_variables: bool = True) -> None:
    """A flag for every option, and --config. What is not given stays absent; what is arrives as text."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for each in options_of(kind):
        if each.group not in groups:
            groups[each.group] = parser.add_argument_group(each.group)
        shown = f" (default: {each.shown})" if each.shown else ""
        known = f" [{variable(each.name)}]" if has_variables else ""
        how: dict[str, Any] = {
            "help": f"{each.help}{shown}{known}".replace("%", "%%"),
            "metavar": each.metavar,
            "default": argparse.SUPPRESS,
        }
        if each.is_positional:
            parser.usage = f"%(prog)s [{each.metavar}] [--OPTION VALUE ...]"
            groups[each.group].add_argument(each.field, nargs="?", **how)
        elif each.is_switch:
            groups[each.group].add_argument(*each.flags, dest=each.field, nargs=0, const="true", **how)
        else:
            number = "+" if each.is_list else None
            groups[each.group].add_argument(*each.flags, dest=each.field, nargs=number, **how)
    for name in removed(kind):
        # hidden; reading the options refuses it with the new way
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=gone_field(name),
            nargs="*",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    known = f" [{variable(CONFIG)}]" if has_variables else ""
    parser.add_argument(
        f"--{CONFIG}",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help=f"YAML file; its keys are the long flags without dashes{known}",
    )
    variables = " over CARREL_* variables" if has_variables else ""
    parser.epilog = f"What is named twice: command line{variables} over --config over default."
    parser.usage = parser.usage or "%(prog)s [--OPTION VALUE ...]"


def arguments(kind: type, texts: Mapping[str, str]) -> list[str]:
    """The command line that gives a process of this kind those of `texts`, by field, that it knows; never a secret."""
    words = []
    for each in options_of(kind):
        text = texts.get(each.field)
        if text is None or each.is_secret:
            continue
        if each.is_positional:
            words.append(text)
        elif not each.is_switch:
            words += [each.flags[0], text]
        elif is_on(text):
            words.append(each.flags[0])
    return words


def gone_field(name: str) -> str:
    """Where a removed option's words are, in what `add_options` made of a command line."""
    return f"removed {name}"


def is_on(text: str) -> bool:
    """Return whether the text of a switch turns it on."""
    return text.strip().lower() in ("1", "true", "t", "yes", "y", "on")


def flag(
    parser: argparse._ActionsContainer,
    name: str,
    help: str,
    default: Any = None,
    parse: Callable[[str], Any] = str,
    metavar: str | None = "N",
    **how: Any,
) -> None:
    """Declare an option of a command that measures or asks; its help ends with the default, unless it says one itself.

    default: a list lets it take several words.
    how: other arguments of argparse's `add_argument`.
    """
    is_list = isinstance(default, list)
    shown = " ".join(map(str, default)) if is_list else default
    is_said = shown is None or shown == "" or "default:" in help
    known = "" if is_said else f"{' ' if help else ''}(default: {shown})"
    several: dict[str, Any] = {"nargs": "+"} if is_list else {}
    text = f"{help}{known}".replace("%", "%%")
    parser.add_argument(name, type=parse, default=default, metavar=metavar, help=text, **several, **how)


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number; raises argparse.ArgumentTypeError for one below `least`."""

    def integer(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is below {least}")
        return number

    return integer


def budget(text: str) -> float | int:
    """Reads a share in (0, 1], or a whole number of tokens from 2 up; raises argparse.ArgumentTypeError."""
    try:
        share, tokens = share_or_tokens(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(
            f"{text} is no share in (0, 1] and no number of tokens from 2 up"
        ) from exc
    return tokens if share is None else share  # type: ignore[return-value]


def new_file(text: str) -> Path:
    """Reads where to write a file, whose folders may have to be made; raises argparse.ArgumentTypeError where it cannot
    be, before hours of work are to be written there."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    folder = next(each for each in path.absolute().parents if each.exists())
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: the folder {folder} may not be written to")
    return path
