"""The policies by name."""

from __future__ import annotations

from gpu_worker.policies.allocation import AdaKV, LayerWise
from gpu_worker.policies.base import Family, Policy
from gpu_worker.policies.full import Full
from gpu_worker.policies.recall import (
    ClusterKV,
    InfiniGen,
    InfLLM,
    Oracle,
    PQCache,
    Quest,
    RecallPolicy,
    SparQ,
)
from gpu_worker.policies.retain import (
    H2O,
    NACL,
    CaM,
    Chelsea,
    H2OCompensated,
    ProtoKV,
    PyramidKV,
    RetainPolicy,
    Scissorhands,
    ScoredPolicy,
    SemanticKV,
    SnapKV,
    StreamingLLM,
)

__all__ = [
    "H2O",
    "NACL",
    "AdaKV",
    "CaM",
    "Chelsea",
    "ClusterKV",
    "Family",
    "Full",
    "H2OCompensated",
    "InfLLM",
    "InfiniGen",
    "LayerWise",
    "Oracle",
    "PQCache",
    "Policy",
    "ProtoKV",
    "PyramidKV",
    "Quest",
    "RecallPolicy",
    "RetainPolicy",
    "Scissorhands",
    "SemanticKV",
    "SnapKV",
    "SparQ",
    "StreamingLLM",
    "registry",
]


def registry(*policies: Policy) -> dict[str, Policy]:
    """The policies by name: those given, and every other one with its paper's defaults; of each its ablations too.

    Raises ValueError when two bear the same name.
    """
    by_name: dict[str, Policy] = {}
    for policy in policies:
        if policy.name in by_name:
            raise ValueError(f"two policies are named {policy.name!r}")
        by_name[policy.name] = policy
    scored: list[ScoredPolicy] = [SnapKV(), SemanticKV(), ProtoKV(), NACL(), H2O()]
    defaults: list[Policy] = [
        Full(),
        Oracle(),
        PQCache(),
        ClusterKV(),
        Quest(),
        InfiniGen(),
        SparQ(),
        SparQ(mean_value=True),
        InfLLM(),
        InfLLM(sparse_prefill=True),
        InfLLM(sparse_prefill=True, clamp_distance=True),
        StreamingLLM(),
        StreamingLLM(shift_positions=True),
        H2OCompensated(),
        Scissorhands(),
        PyramidKV(),
        CaM(),
        Chelsea(),
        *scored,
        *(AdaKV(policy) for policy in scored),
        *(LayerWise(policy) for policy in scored),
        *(LayerWise(AdaKV(policy)) for policy in scored),
        LayerWise(Chelsea()),
    ]
    for default in defaults:
        by_name.setdefault(default.name, default)
    for policy in tuple(by_name.values()):
        for ablation in policy.ablations():
            by_name.setdefault(ablation.name, ablation)
    return by_name
