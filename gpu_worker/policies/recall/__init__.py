"""Recall: everything stays in the store, and every step selects what it attends."""

from gpu_worker.policies.recall.base import Candidates, IndexJob, RecallPolicy
from gpu_worker.policies.recall.clusterkv import ClusterKV
from gpu_worker.policies.recall.infinigen import InfiniGen
from gpu_worker.policies.recall.infllm import InfLLM
from gpu_worker.policies.recall.oracle import Oracle
from gpu_worker.policies.recall.pqcache import PQCache
from gpu_worker.policies.recall.quest import Quest
from gpu_worker.policies.recall.sparq import SparQ

__all__ = [
    "Candidates",
    "ClusterKV",
    "IndexJob",
    "InfLLM",
    "InfiniGen",
    "Oracle",
    "PQCache",
    "Quest",
    "RecallPolicy",
    "SparQ",
]
