"""Selections replayed step by step: random weights select at random, and a hot cache would hit only by chance.

A trace says which positions every head selects at a step. It is asked between the steps, outside of what is timed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.errors import BenchmarkError

# apart from layer to layer, so that layers do not fetch the same positions
LAYER_STRIDE = 7919
# 40 * (1 - 0.9) is below 4
ROUNDING = 1e-6


class WindowTrace:
    """Each step keeps the share `hit_rate` of the positions selected before it and takes fresh ones for the rest.

    Every head of a sequence has a working set of its own, candidates in random order for good. A step selects a window
    of K of them, which moves on by K(1 - hit_rate), round and round; so a position that left it is the one that was
    not used for longest when it comes back. A cache that keeps what was used last hits with a rate of `hit_rate`
    exactly if it has at least K slots and at most working_set - K. Memory: 4 bytes a position of each working set.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        candidates: range,
        num_selected: int,
        hit_rate: float,
        device: torch.device,
        working_set: int | None = None,
        seed: int = 0,
    ) -> None:
        """candidates: positions that may be selected; working_set: how many of them are, None: all.

        Raises BenchmarkError unless num_selected fits the working set and that the candidates.
        """
        size = len(candidates) if working_set is None else working_set
        if not num_selected <= size <= len(candidates):
            raise BenchmarkError(
                f"a trace selects {num_selected} positions out of a working set of {size} out of {len(candidates)}"
            )
        self._num_selected, self._fresh = num_selected, num_selected * (1 - hit_rate)
        generator = torch.Generator(device).manual_seed(seed)
        order = torch.rand(batch, num_kv_heads, len(candidates), generator=generator, device=device)
        self._working_set = (order.argsort(-1)[..., :size] + candidates.start).to(torch.int32)

    def select(self, step: int, out: Tensor) -> None:
        """Write the positions of a step into `out`, int32 or int64 [L, B, H_kv, K]: ascending in every head."""
        size = self._working_set.shape[-1]
        window = torch.arange(self._num_selected, device=out.device)
        for layer, of_layer in enumerate(out):
            places = (window + int(step * self._fresh + ROUNDING) + layer * LAYER_STRIDE) % size
            of_layer.copy_(self._working_set[..., places].sort(-1).values)


def overlap(before: Tensor, after: Tensor) -> float:
    """Mean share of `after` [..., K] that stands in `before` [..., K] too; both ascending, positions from 0 up."""
    places = torch.searchsorted(before.contiguous(), after.contiguous()).clamp(max=before.shape[-1] - 1)
    return float((before.gather(-1, places) == after).float().mean())
