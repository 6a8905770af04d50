"""Where a sequence's attended rows live, by policy family."""

from gpu_worker.engine.caches.base import Cache, Group, GroupStep
from gpu_worker.engine.caches.cache_set import CacheSet
from gpu_worker.engine.caches.dense import DenseCache
from gpu_worker.engine.caches.hot_cache import HotCacheSize
from gpu_worker.engine.caches.recall import RecallCache

__all__ = ["Cache", "CacheSet", "DenseCache", "Group", "GroupStep", "HotCacheSize", "RecallCache"]
