"""Options as they are declared: the fields of a frozen dataclass. Imports no library, so that an engine can too."""

from __future__ import annotations

import inspect
import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

REQUIRED: Any = MISSING
ENV_PREFIX = "CARREL_"
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class OptionError(Exception):
    """A flag, variable, key of a file or configuration that cannot be used. Ends a process with `exit_code`."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option. `name` is its flag without dashes, `also` are its other spellings, `group` is its heading in --help.

    `parse` reads its text and raises ValueError, which begins with "must"; without one, pydantic reads it by the
    field's type. `shown` is the default's text, empty where the help says what happens without one.
    """

    help: str
    field: str = ""
    name: str = ""
    also: tuple[str, ...] = ()
    group: str = ""
    metavar: str = "X"
    parse: Callable[[str], Any] | None = None
    default: Any = None
    shown: str = ""
    is_secret: bool = False
    is_positional: bool = False
    is_switch: bool = False
    is_list: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, *self.also)

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(f"--{each}" for each in self.spellings)


def option(
    default: Any,
    help: str,
    *,
    name: str = "",
    also: tuple[str, ...] = (),
    metavar: str = "X",
    parse: Callable[[str], Any] | None = None,
    secret: bool = False,
    positional: bool = False,
    **rules: Any,
) -> Any:
    """A dataclass field that is an option. REQUIRED has no default; with `parse`, a default may be written as text.

    `rules` are pydantic's for a field, such as `ge=1`. The flag is the field's name, unless `name` says otherwise.
    A default of False makes a switch, which takes no value; one of True takes on or off; a tuple takes several words.
    """
    value = parse(default) if parse and isinstance(default, str) else default
    declared = Option(
        help=help,
        name=name,
        also=also,
        metavar="on|off" if default is True else metavar,
        parse=words if isinstance(default, tuple) and parse is None else parse,
        default=value,
        shown=_shown(default),
        is_secret=secret,
        is_positional=positional,
        is_switch=default is False,
        is_list=isinstance(default, tuple),
    )
    return field(default=value, repr=not secret, metadata={"option": declared, **rules})


def _shown(default: Any) -> str:
    if default is True:
        return "on"
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default in (MISSING, None, ()) or default is False else str(default)


def options_of(kind: type) -> tuple[Option, ...]:
    """The options of a dataclass: its own first, then those of its bases, one after the other."""
    owner = {name: base for base in reversed(kind.__mro__) for name in inspect.get_annotations(base)}
    found = [
        replace(
            item.metadata["option"],
            field=item.name,
            name=item.metadata["option"].name or item.name.replace("_", "-"),
            group=(owner[item.name].__doc__ or "").partition("\n")[0].rstrip("."),
        )
        for item in fields(kind)
        if "option" in item.metadata
    ]
    order = {base: place for place, base in enumerate(kind.__mro__)}
    return tuple(sorted(found, key=lambda each: (order[owner[each.field]], not each.is_positional)))


def spellings(kind: type) -> Mapping[str, Option]:
    """Every name that an option has, with underscores."""
    return {name.replace("-", "_"): each for each in options_of(kind) for name in each.spellings}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The known word that is nearest, as the end of a sentence; empty where none is near."""
    near = get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def variable(name: str) -> str:
    """The environment variable of an option."""
    return ENV_PREFIX + name.replace("-", "_").upper()


def num_bytes(text: str) -> int:
    """A number of bytes: "1073741824", "512M", "1.5GiB". All units are powers of 1024."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ValueError("must be a size such as 8G, 8GiB or 512MiB")
    return size


def num_tokens(text: str) -> int:
    """A number of tokens: "131072", "128K", "1M", in powers of 1024; "128k" and "1m" are 128,000 and a million."""
    match = re.fullmatch(r"(\d{1,9})([kKmM]?)", text.strip())
    if not match:
        raise ValueError("must be a number of tokens such as 131072, 128K or 1M")
    return int(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[match[2]]


def json_object(text: str) -> dict[str, object]:
    """Read a JSON object; raises ValueError for other text."""
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise ValueError(f'must be a JSON object, such as {{"rope_theta": 1e6}} ({exc})') from exc
    if not isinstance(value, dict):
        raise ValueError('must be a JSON object, such as {"rope_theta": 1e6}')
    return value


def auto_or_bytes(text: str) -> int | None:
    """None for "auto"."""
    return None if text.strip().lower() == "auto" else num_bytes(text)


def share_or_tokens(text: str) -> tuple[float | None, int | None]:
    """A share in (0, 1], or a whole number of tokens from 2 up; the other one is None."""
    if re.fullmatch(r"\s*\+?\d{1,15}\s*", text) and int(text) >= 2:
        return None, int(text)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError("must be a share in (0, 1] such as 0.1, or a whole number of tokens from 2 up")
    return share, None


def words(text: str) -> tuple[str, ...]:
    """Words with commas between."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
