"""The policies by name."""

from __future__ import annotations

from gpu_worker.policies.base import Family, Policy
from gpu_worker.policies.full import Full
from gpu_worker.policies.recall import ClusterKV, Oracle, PQCache, RecallPolicy
from gpu_worker.policies.retain import RetainPolicy, StreamingLLM

__all__ = [
    "ClusterKV",
    "Family",
    "Full",
    "Oracle",
    "PQCache",
    "Policy",
    "RecallPolicy",
    "RetainPolicy",
    "StreamingLLM",
    "registry",
]


def registry(*policies: Policy) -> dict[str, Policy]:
    """The policies by name: those given, and every other one with its paper's defaults.

    Raises ValueError when two bear the same name.
    """
    by_name: dict[str, Policy] = {}
    for policy in policies:
        if policy.name in by_name:
            raise ValueError(f"two policies are named {policy.name!r}")
        by_name[policy.name] = policy
    for default in (Full(), Oracle(), PQCache(), ClusterKV(), StreamingLLM()):
        by_name.setdefault(default.name, default)
    return by_name
