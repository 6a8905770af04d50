"""Tables of options: what --help prints, from the records that the processes read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from carrel.commands.deploy import DeployOptions
from carrel.process.options import Option, options_of, variable
from carrel.serve.options import ServeOptions


def serve() -> str:
    """Every option of `carrel serve`, in the groups of its help."""
    return _table(options_of(ServeOptions))


def deploy() -> str:
    """What `carrel deploy` has beside the options of `carrel serve`."""
    shared = {each.field for each in options_of(ServeOptions)} - {"host", "port", "model"}
    return _table(
        (each for each in options_of(DeployOptions) if each.field not in shared), has_variables=False
    )


def own(kind: type) -> Callable[[], str]:
    """What a process has beside the options of `carrel serve`."""
    shared = {each.field for each in options_of(ServeOptions)} - {"model"}
    return lambda: _table(each for each in options_of(kind) if each.field not in shared)


def _table(options: Iterable[Option], *, has_variables: bool = True) -> str:
    lines = ["| option | meaning | default | variable |", "| --- | --- | --- | --- |"]
    for group, members in groupby(options, lambda each: each.group):
        lines.append(f"| **{group}** | | | |")
        for each in members:
            names = [each.metavar] if each.is_positional else each.flags
            cells = (", ".join(f"`{name}`" for name in names), each.help, each.shown and f"`{each.shown}`")
            lines.append(f"| {' | '.join(cells)} | {f'`{variable(each.name)}`' if has_variables else '-'} |")
    return "\n".join(lines)
