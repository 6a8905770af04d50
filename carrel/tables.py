"""Tables of measurements: on a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.console import Console
from rich.table import Table

R = TypeVar("R")


@dataclass(frozen=True)
class Column(Generic[R]):
    """A heading and what stands under it."""

    heading: str
    text: Callable[[R], str]
    is_number: bool = True


def show(title: str, columns: Sequence[Column[R]], rows: Sequence[R], notes: Iterable[str] = ()) -> None:
    """On stdout: drawn on a terminal; elsewhere, where it would be squeezed into 80 columns, as Markdown."""
    console = Console()
    if not console.is_terminal:
        print(markdown(columns, rows, notes))
        return
    table = Table(title=title)
    for column in columns:
        table.add_column(column.heading, justify="right" if column.is_number else "left")
    for row in rows:
        table.add_row(*(column.text(row) for column in columns))
    console.print(table)
    for note in notes:
        console.print(f"- {note}", highlight=False, markup=False)


def markdown(columns: Sequence[Column[R]], rows: Sequence[R], notes: Iterable[str] = ()) -> str:
    """The table, and the notes as a list below."""
    lines = [_line(column.heading for column in columns)]
    lines.append(_line("---:" if column.is_number else "---" for column in columns))
    lines += [_line(column.text(row) for column in columns) for row in rows]
    listed = [f"- {note}" for note in notes]
    return "\n".join([*lines, "", *listed] if listed else lines)


def interval(middle: float, low: float, high: float, digits: int) -> str:
    """Such as "0.98 (0.95-1.00)"."""
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def tokens(count: int) -> str:
    """131072 as 128K, 1048576 as 1M."""
    if count and count % (1 << 20) == 0:
        return f"{count >> 20}M"
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else str(count)


def gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.1f}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
