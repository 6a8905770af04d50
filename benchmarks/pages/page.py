"""A page's generated parts: what stands between `<!-- table NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

BEGIN = re.compile(r"<!-- table (\S+) -->")
END = "<!-- end -->"


class PageError(ValueError):
    """A marker that cannot be filled."""


def fill(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """`text` with every generated part replaced.

    Raises PageError for a name that `tables` does not have, and for a marker that is not closed.
    """
    parts, rest = [], text
    while found := BEGIN.search(rest):
        name = found[1]
        if name not in tables:
            raise PageError(f"no table {name!r}; there are {', '.join(sorted(tables))}")
        end = rest.find(END, found.end())
        following = BEGIN.search(rest, found.end())
        if end < 0 or (following and following.start() < end):
            raise PageError(f"table {name!r} is not closed by {END}")
        parts.append(f"{rest[: found.end()]}\n\n{tables[name]()}\n\n{END}")
        rest = rest[end + len(END) :]
    return "".join([*parts, rest])
