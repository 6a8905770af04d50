"""The benchmarks of `carrel bench`, each a module with `add_arguments`, `run` and `render`."""

from __future__ import annotations


def module_of(name: str) -> str:
    return f"benchmarks.commands.{name}"
