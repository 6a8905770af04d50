"""Tables of the registry: what `carrel methods` prints."""

from __future__ import annotations

from benchmarks import tables
from benchmarks.tables import Column
from gpu_worker.policies.registry import registry
from gpu_worker.policies.table import PolicySummary, methods


def by_themselves() -> str:
    """Every method by itself."""
    columns = (
        Column[PolicySummary]("policy", lambda method: f"`{method.name}`", False),
        Column("family", lambda method: method.family, False),
        Column("what it keeps", lambda method: method.keeps, False),
        Column("paper", lambda method: method.paper or "-", False),
        Column(
            "parameters", lambda method: ", ".join(f"`{each}`" for each in method.parameters) or "-", False
        ),
    )
    return tables.markdown(columns, [method for method in methods(registry()) if "+" not in method.name])


def others() -> str:
    """The names of variants, wrapped policies and ablations, by the method that they begin with."""
    by_method: dict[str, list[str]] = {}
    for name in registry():
        method, _, rest = name.partition("+")
        if rest:
            by_method.setdefault(method, []).append(f"`+{rest}`")
    columns = (
        Column[tuple[str, list[str]]]("method", lambda line: f"`{line[0]}`", False),
        Column("also", lambda line: ", ".join(line[1]), False),
    )
    return tables.markdown(columns, list(by_method.items()))
