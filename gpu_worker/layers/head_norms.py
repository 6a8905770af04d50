"""Norms of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.layers.block import ALONE, Module, Target
from gpu_worker.layers.norm import RmsNorm


class HeadNorms(Module):
    """RMSNorms of each query head and of each key head, or of neither.

    names: their modules, both or none.
    heads: a rank's query heads and its key heads.
    """

    # Whether each rank may norm its own heads.
    is_divisible = True

    def __init__(
        self,
        names: tuple[str, str] | None,
        heads: tuple[int, int],
        head_dim: int,
        eps: float,
        target: Target,
    ) -> None:
        super().__init__()
        if target.rank != ALONE and not self.is_divisible:
            raise ModelError("norms over all heads of a layer cannot be divided among ranks")
        self.eps = eps
        self._heads, self._head_dim = heads, head_dim
        widths = self._widths()
        norms = [RmsNorm(*each, eps, target) for each in zip(names, widths, strict=True)] if names else []
        self.norms = torch.nn.ModuleList(norms)
        self._each = tuple(norms)

    def _widths(self) -> tuple[int, int]:
        return self._head_dim, self._head_dim

    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of queries' and keys' norms that RoPE's launch applies before it turns."""
        return None, None

    def before(self, qkv: Tensor) -> Tensor:
        """Return the projection [T, (H_q + 2 H_kv) * d], in which this may write, as RoPE is to have it."""
        return qkv

    def after(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the turned queries [T, H_q, d] normed; keys [T, H_kv, d] are normed in place."""
        return queries


class NormsInRope(HeadNorms):
    """Norms before RoPE, in its launch."""

    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        if not self._each:
            return None, None
        return self._each[0].weight, self._each[1].weight


class NormsAfterRope(HeadNorms):
    """Norms of turned heads."""

    def after(self, queries: Tensor, keys: Tensor) -> Tensor:
        of_queries, of_keys = self._each
        keys.copy_(of_keys.normed(keys.reshape(-1, self._head_dim)).view(keys.shape))
        return of_queries.normed(queries.reshape(-1, self._head_dim)).view(queries.shape)


class NormsOverWidth(HeadNorms):
    """Norms before RoPE over all query heads together, and over all key heads."""

    is_divisible = False

    def _widths(self) -> tuple[int, int]:
        num_heads, num_kv_heads = self._heads
        return num_heads * self._head_dim, num_kv_heads * self._head_dim

    def before(self, qkv: Tensor) -> Tensor:
        widths = self._widths()
        for part, norm in zip(qkv[:, : sum(widths)].split(widths, dim=1), self._each, strict=True):
            part.copy_(norm.normed(part))
        return qkv
