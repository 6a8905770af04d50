"""The policies as a table: what `carrel methods`, `carrel eval --policies ablations` and docs/methods.md go by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass

from gpu_worker.policies.base import Policy
from gpu_worker.policies.hyper_parameters import hyper_parameters
from gpu_worker.policies.registry import ablations

SUMMARY = re.compile(r"(?P<keeps>.*?)(?: \((?P<paper>[^()]*)\))?\.")


@dataclass(frozen=True)
class PolicySummary:
    """One policy. keeps, paper: of its class's first sentence, "What it keeps (Paper, section)."; paper may be empty.
    parameters: its fields, such as "num_sink=4 (0 to 100000)", with the range of those that may be set. ablation_of:
    the method that it is an ablation of, or empty."""

    name: str
    family: str
    paper: str
    keeps: str
    parameters: tuple[str, ...]
    ablation_of: str

    @classmethod
    def of(cls, policy: Policy, ablation_of: str = "") -> PolicySummary:
        """Raises ValueError for a class without such a sentence."""
        summary = " ".join((type(policy).__doc__ or "").partition("\n\n")[0].split())
        if (found := SUMMARY.match(summary)) is None:
            raise ValueError(
                f"{type(policy).__name__} needs a docstring that begins: What it keeps (Paper, section)."
            )
        return cls(
            policy.name,
            policy.family.value,
            found["paper"] or "",
            found["keeps"],
            tuple(_parameters(policy)),
            ablation_of,
        )


def methods(policies: Mapping[str, Policy]) -> list[PolicySummary]:
    """List a summary of each policy by name, in this order, in which a method stands before its ablations."""
    methods_by_ablation = ablations()
    return [PolicySummary.of(policy, methods_by_ablation.get(name, "")) for name, policy in policies.items()]


def _parameters(policy: Policy) -> Iterable[str]:
    if not is_dataclass(policy):
        return
    settable = hyper_parameters(policy)
    for field in fields(policy):
        value = getattr(policy, field.name)
        shown = (
            value.name if isinstance(value, Policy) else f"{value:.4g}" if isinstance(value, float) else value
        )
        rule = f" ({settable[field.name].range})" if field.name in settable else ""
        yield f"{field.name}={shown}{rule}"
