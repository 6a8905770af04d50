"""The policies by name."""

from __future__ import annotations

from gpu_worker.policies.adakv.policy import AdaKV
from gpu_worker.policies.base import Family, Policy
from gpu_worker.policies.cam.policy import CaM
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.full.policy import Full
from gpu_worker.policies.h2o.policy import H2O, H2OCompensated
from gpu_worker.policies.infinigen.policy import InfiniGen
from gpu_worker.policies.infllm.policy import InfLLM
from gpu_worker.policies.layerwise.policy import LayerWise
from gpu_worker.policies.nacl.policy import NACL
from gpu_worker.policies.oracle.policy import Oracle
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.protokv.policy import ProtoKV
from gpu_worker.policies.pyramidkv.policy import PyramidKV
from gpu_worker.policies.quest.policy import Quest
from gpu_worker.policies.recall import RecallPolicy
from gpu_worker.policies.retain import RetainPolicy, ScoredPolicy
from gpu_worker.policies.scissorhands.policy import Scissorhands
from gpu_worker.policies.semantickv.policy import SemanticKV
from gpu_worker.policies.snapkv.policy import SnapKV
from gpu_worker.policies.sparq.policy import SparQ
from gpu_worker.policies.streaming_llm.policy import StreamingLLM

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
