"""The caches of a sequence's attended rows, by policy family."""

from gpu_worker.caches.base import Cache, GroupStep, ServedLayer
from gpu_worker.caches.cache_set import CacheSet, LayerSteps
from gpu_worker.caches.dense import DenseCache
from gpu_worker.caches.layer_map import LayerMap
from gpu_worker.caches.recall.cache import RecallCache, recall_policy
from gpu_worker.caches.retain.cache import RetainCache
from gpu_worker.records import HotCacheSize

__all__ = [
    "Cache",
    "CacheSet",
    "DenseCache",
    "GroupStep",
    "HotCacheSize",
    "LayerMap",
    "LayerSteps",
    "RecallCache",
    "RetainCache",
    "ServedLayer",
    "recall_policy",
]
