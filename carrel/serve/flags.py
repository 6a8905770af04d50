"""How one option of `carrel serve` is spelled, read and handed to the processes."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

STORE, WORKER, GATEWAY = "store", "worker", "gateway"

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Flag:
    """One option. `to` maps the processes that take it to their own spelling of it."""

    help: str
    parse: Callable[[str], Any] = str
    to: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    metavar: str = "X"
    is_secret: bool = False
    is_switch: bool = False


def flag(
    default: Any,
    help: str,
    parse: Callable[[str], Any] = str,
    to: Mapping[str, str] | None = None,
    aliases: tuple[str, ...] = (),
    metavar: str = "X",
    is_secret: bool = False,
) -> Any:
    """A dataclass field that carries its `Flag`. A default of None leaves the choice to the process."""
    return field(default=default, metadata={"flag": Flag(help, parse, to or {}, aliases, metavar, is_secret)})


def switch(help: str, to: Mapping[str, str]) -> Any:
    """A field that is False unless named; on the command line it takes no value."""
    return field(default=False, metadata={"flag": Flag(help, true_or_false, to, is_switch=True)})


def true_or_false(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.strip().lower() not in words:
        raise ValueError("expected true or false")
    return words[text.strip().lower()]


def tcp_port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise ValueError("expected a port between 0 and 65535")
    return number


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("expected a whole number from 1 up")
    return number


def natural_int(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError("expected a whole number from 0 up")
    return number


def num_bytes(text: str) -> int:
    """A number of bytes: "1073741824", "512M", "1.5GiB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ValueError("expected a size such as 8GiB or 512MiB")
    return size


def seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("expected a number of seconds from 0 up")
    return value


def share_or_tokens(text: str) -> str:
    """A share of the context in (0, 1], or a number of tokens from 2 up; kept as it was written."""
    value = float(text)
    if not (0 < value <= 1 or (value >= 2 and value.is_integer())):
        raise ValueError("expected a share in (0, 1] or a whole number of tokens from 2 up")
    return text.strip()


def auto_or_share_or_tokens(text: str) -> str:
    return text.strip() if text.strip() == "auto" else share_or_tokens(text)


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser that takes exactly these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return text

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number; raises argparse.ArgumentTypeError for one below `least`."""

    def integer(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is below {least}")
        return number

    return integer
