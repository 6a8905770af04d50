"""Where a sequence's attended rows live, by policy family."""

from gpu_worker.engine.caches.base import Cache, GroupStep
from gpu_worker.engine.caches.cache_set import CacheSet, LayerSteps
from gpu_worker.engine.caches.dense import DenseCache
from gpu_worker.engine.caches.hot_cache import HotCacheSize
from gpu_worker.engine.caches.recall import RecallCache, recall_policy
from gpu_worker.engine.caches.retain import RetainCache

__all__ = [
    "Cache",
    "CacheSet",
    "DenseCache",
    "GroupStep",
    "HotCacheSize",
    "LayerSteps",
    "RecallCache",
    "RetainCache",
    "recall_policy",
]
