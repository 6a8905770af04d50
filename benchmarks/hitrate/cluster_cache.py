"""ClusterKV's own cache held against a recorded selection: what the last R steps selected (section IV-D, CK-A4)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.hitrate.paper_hits import PaperHits


def cluster_cache_hits(positions: Tensor, labels: Tensor, depth: int) -> PaperHits:
    """Hits of a cache of the last `depth` steps, empty before the first; each layer and KV head has its own.

    positions: int32 [steps, L, B, H_kv, K]. labels: int32 [L, B, H_kv, N], the cluster of every position. A cluster
    hits where one of those steps selected any of it, as the paper counts. A token hits where one of them selected the
    token itself: the last cluster of a step is trimmed, and what was cut off was never brought to the device.
    """
    heads, clusters = positions.flatten(1, 3).long(), labels.flatten(0, 2).long()
    tokens, num_tokens = _recent(heads, labels.shape[-1], depth)
    of_cluster, _ = _recent((clusters.gather(1, step) for step in heads), int(clusters.max()) + 1, depth)
    return PaperHits(tokens, of_cluster, num_tokens)


def _recent(steps: Iterable[Tensor], num_ids: int, depth: int) -> tuple[Tensor, float]:
    """Share of each step's ids, counted once, that one of the `depth` steps before had, mean over heads: float64
    [steps]; and the most ids that are held at a step, mean over heads. steps: int64 [heads, K] each."""
    shares, most, last = [], 0.0, None
    for number, ids in enumerate(steps):
        if last is None:
            last = torch.full((ids.shape[0], num_ids), -depth - 1, dtype=torch.int32, device=ids.device)
        chosen = torch.zeros_like(last, dtype=torch.bool).scatter_(1, ids, True)
        held = last >= number - depth
        shares.append(((chosen & held).sum(1).double() / chosen.sum(1)).mean())
        most = max(most, float(held.sum(1).double().mean()))
        last.masked_fill_(chosen, number)
    return torch.stack(shares).cpu(), most
