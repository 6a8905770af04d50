"""PQCache's own cache held against a recorded selection: blocks of tokens by LFU or LRU (section 3.4)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.hitrate.cached_request import CachedRequest
from benchmarks.hitrate.paper_hits import PaperHits

BLOCK_TOKENS = 128
EVICTIONS = ("lfu", "lru")

Counts = npt.NDArray[np.int64]


class BlockCache:
    """At most `num_blocks` blocks. A full one evicts the block used least often ("lfu"), of those and else ("lru") the
    one used longest ago. A use is an insertion; what is evicted is forgotten."""

    def __init__(self, num_blocks: int, eviction: str) -> None:
        self._num_blocks, self._counts_uses = num_blocks, eviction == "lfu"
        self._time = 0
        # of each block: uses, of which LRU knows none, and the time of the last
        self._used: dict[int, tuple[int, int]] = {}

    @property
    def blocks(self) -> list[int]:
        return list(self._used)

    def insert(self, blocks: Iterable[int]) -> None:
        """One after the other, those that are there already as well."""
        for block in blocks:
            uses, _ = self._used.get(block, (0, 0))
            if block not in self._used and len(self._used) == self._num_blocks:
                del self._used[min(self._used, key=self._used.__getitem__)]
            self._time += 1
            self._used[block] = (uses + self._counts_uses, self._time)


def block_cache_hits(
    positions: Tensor, request: CachedRequest, eviction: str, num_blocks: int, k_cache: int
) -> PaperHits:
    """Hits of a cache of `num_blocks` blocks, empty before the first step; each layer of a sequence has its own.

    positions: int32 [steps, L, B, H_kv, K]. Blocks are cut behind the sinks and have the rows of all KV heads. After
    each step its `k_cache` blocks of most selected tokens, over all heads, are inserted, most first (ties: the later
    block); they serve from the next step on. A block that the window has not yet left whole is never inserted: it
    would lack tokens that follow.
    """
    counts = _block_counts(positions, request)
    num_steps, num_caches, _ = counts.shape
    hits, held = np.zeros(num_steps), np.zeros(num_steps)
    for of_layer in counts.transpose(1, 0, 2):
        cache = BlockCache(num_blocks, eviction)
        for step, (selected, begin) in enumerate(zip(of_layer, request.window_begins, strict=True)):
            hits[step] += selected[cache.blocks].sum() / selected.sum() / num_caches
            held[step] += len(cache.blocks) * BLOCK_TOKENS / num_caches
            num_complete = (begin - request.num_sink) // BLOCK_TOKENS
            cache.insert(most_selected(selected[:num_complete], k_cache))
    return PaperHits(torch.from_numpy(hits), None, float(held.max()))


def most_selected(selected: Counts, k: int) -> list[int]:
    """At most `k` blocks of the largest counts, none of 0: largest first, of equal ones the later first."""
    order = selected.size - 1 - np.argsort(-selected[::-1], kind="stable")
    best: list[int] = order[:k].tolist()
    return [block for block in best if selected[block] > 0]


def _block_counts(positions: Tensor, request: CachedRequest) -> Counts:
    """Selected tokens in every block, over all KV heads: [steps, L * B, blocks]."""
    blocks = (positions.long() - request.num_sink) // BLOCK_TOKENS
    by_layer = blocks.flatten(3).flatten(1, 2)
    counts = by_layer.new_zeros(*by_layer.shape[:2], request.capacity // BLOCK_TOKENS + 1)
    counts.scatter_add_(2, by_layer, torch.ones_like(by_layer))
    return np.asarray(counts.cpu().numpy())
