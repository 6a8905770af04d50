"""Selections replayed step by step: random weights select at random, and a hot cache would hit only by chance.

A trace says which positions every head selects at a step. It is asked between the steps, outside of what is timed.
"""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.errors import BenchmarkError

# apart from layer to layer, so that layers do not fetch the same positions
LAYER_STRIDE = 7919
# 40 * (1 - 0.9) is below 4
ROUNDING = 1e-6


class SelectionTrace(ABC):
    """Positions [L, B, H_kv, K] of each step, ascending in every head, none twice; any step may be asked."""

    @abstractmethod
    def select(self, step: int, out: Tensor) -> None:
        """Write the positions of a step into `out`, int32 or int64 [L, B, H_kv, K] on the trace's device."""


class WindowTrace(SelectionTrace):
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
        size = self._working_set.shape[-1]
        window = torch.arange(self._num_selected, device=out.device)
        for layer, of_layer in enumerate(out):
            places = (window + int(step * self._fresh + ROUNDING) + layer * LAYER_STRIDE) % size
            of_layer.copy_(self._working_set[..., places].sort(-1).values)


class RecordedTrace(SelectionTrace):
    """Positions recorded from a model; layers, sequences, heads and steps beyond the recorded ones repeat them."""

    def __init__(self, positions: Tensor, context: int) -> None:
        """positions: int32 [steps, L, B, H_kv, K], ascending in every head. context: tokens of the prompts."""
        self.positions = positions
        self.context = context

    @classmethod
    def load(cls, path: Path, device: torch.device) -> RecordedTrace:
        """From the arrays `positions` and `context` of an npz file; without the latter, the highest position counts.

        Raises BenchmarkError for any other content.
        """
        try:
            with np.load(path) as arrays:
                positions = torch.from_numpy(arrays["positions"])
                context = int(arrays["context"]) if "context" in arrays else None
        except (OSError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as exc:
            raise BenchmarkError(f"{path} holds no selection trace: {exc}") from exc
        if positions.dim() != 5 or positions.dtype != torch.int32 or positions.numel() == 0:
            shape = list(positions.shape)
            raise BenchmarkError(
                f"{path}: positions are {positions.dtype} {shape}, not int32 [steps, L, B, H, K] of a trace"
            )
        if not bool((positions.diff(dim=-1) > 0).all()) or int(positions.min()) < 0:
            raise BenchmarkError(f"{path}: positions of a trace's head are not ascending from 0 up")
        return cls(positions.to(device), int(positions.max()) + 1 if context is None else context)

    def save(self, path: Path) -> None:
        """As `load` reads it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, positions=self.positions.cpu().numpy(), context=np.int64(self.context))

    @property
    def num_selected(self) -> int:
        """K: what `out` must be wide."""
        return self.positions.shape[-1]

    @property
    def hit_rate(self) -> float:
        """Mean share of a step's positions that the step before selected too; 0 for a single step."""
        pairs = zip(self.positions[:-1], self.positions[1:], strict=True)
        shares = [overlap(before, after) for before, after in pairs]
        return sum(shares) / max(1, len(shares))

    def at(self, context: int, candidates: range) -> RecordedTrace:
        """The trace at another context: positions times the ratio of the contexts, none outside of the candidates.

        Positions that meet move on to the next free one, or back where there is none; so at a context that is no
        shorter than the recorded one every repetition is kept. Raises BenchmarkError where K candidates are missing.
        """
        if self.num_selected > len(candidates):
            raise BenchmarkError(f"a trace selects {self.num_selected} positions out of {len(candidates)}")
        order = torch.arange(self.num_selected, device=self.positions.device)
        scaled = self.positions.long() * context // self.context
        # without `order` what must ascend need only not fall
        apart = (scaled.clamp(min=candidates.start) - order).cummax(dim=-1).values + order
        last = candidates.stop - self.num_selected + order
        return RecordedTrace(apart.minimum(last).to(torch.int32), context)

    def select(self, step: int, out: Tensor) -> None:
        recorded = self.positions[step % self.positions.shape[0]]
        layers, rows, heads = (
            torch.arange(size, device=out.device) % num_recorded
            for size, num_recorded in zip(out.shape[:3], recorded.shape[:3], strict=True)
        )
        out.copy_(recorded[layers[:, None, None], rows[:, None], heads])


def overlap(before: Tensor, after: Tensor) -> float:
    """Mean share of `after` [..., K] that stands in `before` [..., K] too; both ascending, positions from 0 up."""
    places = torch.searchsorted(before.contiguous(), after.contiguous()).clamp(max=before.shape[-1] - 1)
    return float((before.gather(-1, places) == after).float().mean())
