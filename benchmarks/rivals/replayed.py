"""Policies that score and select, and then attend what a trace says: the full cost, with a known overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.errors import NotMeasurable
from benchmarks.figures import DecodeCase
from benchmarks.rivals.bare_engine import name_of
from benchmarks.shapes import ModelShape
from benchmarks.traces import WindowTrace
from gpu_worker.policies.bitkeys.policy import BitKeys
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.recall import Candidates
from gpu_worker.state.batch import Buckets
from gpu_worker.state.sequence import Sequence as EngineSequence


@dataclass(frozen=True, slots=True)
class ReplayedPQCache(PQCache):
    """traced: where a step finds the positions to attend, int64 [L, rows, H_kv, K], -1 for padding. It must stay the
    same tensor: a captured step reads it where it was."""

    traced: Tensor = field(kw_only=True, compare=False)

    def select(self, index: Any, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        selected = PQCache.select(self, index, candidates, counts, width)
        return self.traced[candidates.layer, : selected.shape[0], :, : selected.shape[2]]


@dataclass(frozen=True, slots=True)
class ReplayedBitKeys(BitKeys):
    """traced: as `ReplayedPQCache` has it."""

    traced: Tensor = field(kw_only=True, compare=False)

    def select(self, index: Any, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        selected = BitKeys.select(self, index, candidates, counts, width)
        return self.traced[candidates.layer, : selected.shape[0], :, : selected.shape[2]]


# The policies that are replayed, and with a trace.
REPLAYED = {"pqcache": (PQCache(), ReplayedPQCache), "bitkeys": (BitKeys(), ReplayedBitKeys)}


class Replayed:
    """A case's policy and the trace that it replays."""

    def __init__(self, case: DecodeCase, shape: ModelShape, device: torch.device) -> None:
        if name_of(case) not in REPLAYED:
            raise NotMeasurable(
                f"selections are replayed for {' and '.join(REPLAYED)}, not for {case.policy}"
            )
        self._case, self._shape, self._device = case, shape, device
        assert case.budget_tokens is not None
        plain, with_trace = REPLAYED[name_of(case)]
        self._num_selected = plain.plan(case.context, case.budget_tokens).num_selected or 0
        buckets = Buckets(is_exact=device.type != "cuda")
        # Nothing is selected until all are there. What pads the batch selects nothing, ever.
        rows, width = buckets.lanes(case.batch), buckets.width(self._num_selected)
        size = (shape.num_layers, rows, shape.num_kv_heads, width)
        self._traced = torch.full(size, -1, dtype=torch.int64, device=device)
        self.policy = with_trace(traced=self._traced)

    def prepare(self, running: Sequence[EngineSequence]) -> Callable[[int], None]:
        """Start to replay; the function writes the selection of step i, which is to be called before it."""
        case, num_heads = self._case, self._shape.num_kv_heads
        assert case.hit_rate is not None
        candidates = range(running[0].plan.num_sink, running[0].window_begin - 1)
        trace = WindowTrace(
            case.batch, num_heads, candidates, self._num_selected, case.hit_rate, self._device
        )
        selected = self._traced[:, : case.batch, :, : self._num_selected]
        count = 0

        def before(_: int) -> None:
            # The warm-up is over twice: of the engine, then of the clock.
            nonlocal count
            trace.select(count, selected)
            count += 1

        return before
