"""Every kernel's cases by the name of its operation."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernels import dense, groups, indexes, rows
from benchmarks.kernels.base import KernelCase, Setting

OPERATIONS = dense.OPERATIONS | rows.OPERATIONS | indexes.OPERATIONS | groups.OPERATIONS
OPS = tuple(OPERATIONS)


def cases_of(op: str, setting: Setting) -> Iterator[KernelCase]:
    """The cases of one operation. Operands that its cases share are freed with them: take one after the other."""
    yield from OPERATIONS[op].cases(op, setting)
