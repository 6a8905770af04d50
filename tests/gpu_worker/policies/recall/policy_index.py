"""Indexes and segments on tiny shapes, for the tests of the policies."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.policies import RecallPolicy
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.recall.base import Candidates

SHAPE = CacheShape(
    max_num_seqs=3,
    num_layers=2,
    num_kv_heads=2,
    group_size=2,
    head_dim=8,
    max_model_len=512,
    scale=0.35,
    device=torch.device("cpu"),
)


def poison(index: object) -> None:
    """Fill an index with what a CUDA allocation may hold."""
    for name in index.__slots__:  # type: ignore[attr-defined]
        tensor = getattr(index, name)
        if tensor is None:
            continue
        tensor.fill_(float("nan") if tensor.is_floating_point() else 113)


def pq_segment(codebooks: Tensor, codes: Tensor) -> dict[str, Tensor]:
    return {"codebooks": codebooks, "codes": codes}


def kmeans_segment(centroids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"centroids": centroids, "labels": labels.int()}


def select(
    policy: RecallPolicy, index: object, query: Tensor, spans: dict[int, tuple[int, int]], layer: int, k: int
) -> list[list[list[int]]]:
    """The k positions that each seat's heads select. spans: seat to its candidates; query: [B, H_q, d]."""
    begin, end = torch.tensor(list(spans.values())).T
    seats, num_positions = torch.tensor(list(spans)), int(end.max())
    candidates = Candidates(layer, query, seats, begin, end, num_positions, SHAPE.scale)
    return policy.select(index, candidates, torch.full((len(spans),), k), k).tolist()
