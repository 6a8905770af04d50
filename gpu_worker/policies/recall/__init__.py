"""Recall: everything stays in the store, and every step selects what it attends."""

from gpu_worker.policies.recall.base import Candidates, IndexJob, RecallPolicy
from gpu_worker.policies.recall.clusterkv import ClusterKV
from gpu_worker.policies.recall.oracle import Oracle
from gpu_worker.policies.recall.pqcache import PQCache

__all__ = ["Candidates", "ClusterKV", "IndexJob", "Oracle", "PQCache", "RecallPolicy"]
