"""The papers' own caches by name, and their rows of the hit rate benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.hitrate.block_cache import EVICTIONS, block_cache_hits
from benchmarks.hitrate.cluster_cache import cluster_cache_hits
from benchmarks.hitrate.paper_hits import PaperHits
from benchmarks.hitrate.rates import HitRateCase, settled
from benchmarks.hitrate.recorder import Recording

CLUSTERS = "clusters"
PAPER_CACHES = (CLUSTERS, *EVICTIONS)


@dataclass(frozen=True)
class PaperCache:
    """One of the papers' own caches. name: "clusters" (ClusterKV), "lfu" or "lru" (of blocks, PQCache). setting: of
    "clusters" R, the steps that it holds; of the others k_cache, the blocks inserted after a step. num_blocks: their
    size; "clusters" has none."""

    name: str
    setting: int
    num_blocks: int = 0


@dataclass(frozen=True)
class PaperCacheRow:
    """A case and one of the papers' own caches. Rates are means as of HitRateRow; settled: in the second half of the
    steps. held_tokens, tokens, clusters: as of PaperHits."""

    case: HitRateCase
    budget_tokens: int
    num_selected: int
    cache: PaperCache
    held_tokens: float
    tokens: float
    tokens_settled: float
    clusters: float | None
    clusters_settled: float | None


def paper_rows_of(
    case: HitRateCase, recording: Recording, caches: Sequence[PaperCache]
) -> list[PaperCacheRow]:
    """A row for each cache that the recording can be held against: only ClusterKV selects clusters."""
    return [
        _row(case, recording, cache, hits)
        for cache in caches
        if (hits := hits_of(recording, cache)) is not None
    ]


def hits_of(recording: Recording, cache: PaperCache) -> PaperHits | None:
    """None for a cache of clusters where none were recorded."""
    if cache.name != CLUSTERS:
        num_blocks, k_cache = cache.num_blocks, cache.setting
        return block_cache_hits(recording.positions, recording.request, cache.name, num_blocks, k_cache)
    if recording.labels is None:
        return None
    return cluster_cache_hits(recording.positions, recording.labels, cache.setting)


def _row(case: HitRateCase, recording: Recording, cache: PaperCache, hits: PaperHits) -> PaperCacheRow:
    clusters = hits.clusters
    return PaperCacheRow(
        case,
        recording.budget_tokens,
        recording.request.num_selected,
        cache,
        round(hits.held_tokens, 1),
        tokens=round(float(hits.tokens.mean()), 4),
        tokens_settled=round(settled(hits.tokens), 4),
        clusters=None if clusters is None else round(float(clusters.mean()), 4),
        clusters_settled=None if clusters is None else round(settled(clusters), 4),
    )
