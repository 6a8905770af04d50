"""The recall policies, each keeping what it selected last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.oracle.policy import Oracle
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.recall import Candidates, RecallPolicy


class Kept:
    """The selection of the last step of one sequence, -1 pads. A captured step writes it too, where it lies.

    labels: int32 [L, H_kv, N], the cluster of every position, where the policy's index has it; None: it has none.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, width: int, device: torch.device) -> None:
        """width: at least what is selected, as wide as `select` is asked for."""
        self.positions = torch.full((num_layers, num_kv_heads, width), -1, dtype=torch.int32, device=device)
        self.labels: Tensor | None = None

    def keep(self, layer: int, selected: Tensor) -> Tensor:
        """selected: int64 [1, H_kv, width]; returned as it is."""
        self.positions[layer].copy_(selected[0])
        return selected


@dataclass(frozen=True, slots=True)
class RecordedPQCache(PQCache):
    kept: Kept | None = None

    def select(self, index: Any, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        assert self.kept is not None
        return self.kept.keep(candidates.layer, PQCache.select(self, index, candidates, counts, width))


@dataclass(frozen=True, slots=True)
class RecordedClusterKV(ClusterKV):
    kept: Kept | None = None

    def select(self, index: Any, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        assert self.kept is not None
        # the one seat's; a cluster stays what it is, so it is enough to read them in the end
        self.kept.labels = index.labels[0]
        return self.kept.keep(candidates.layer, ClusterKV.select(self, index, candidates, counts, width))


@dataclass(frozen=True, slots=True)
class RecordedOracle(Oracle):
    kept: Kept | None = None

    def select(self, index: Any, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        assert self.kept is not None
        return self.kept.keep(candidates.layer, Oracle.select(self, index, candidates, counts, width))


RECORDED: dict[str, Callable[..., RecallPolicy[Any]]] = {
    "pqcache": RecordedPQCache,
    "clusterkv": RecordedClusterKV,
    "oracle": RecordedOracle,
}
