"""The hits of a simulated cache of a paper."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PaperHits:
    """What one of the papers' own caches holds of a recorded selection, by step, mean over all else.

    tokens: share of the selected positions, float64 [steps]. clusters: share of the selected clusters, of which the
    positions are; None for a cache of no clusters. held_tokens: per layer and KV head, at the step that has most.
    """

    tokens: Tensor
    clusters: Tensor | None
    held_tokens: float
