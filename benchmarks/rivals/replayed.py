"""PQCache that scores as ever and then attends what a trace says: the cost of selecting, with a known overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.errors import NotMeasurable
from benchmarks.records import DecodeCase
from benchmarks.shapes import ModelShape
from benchmarks.traces import RecordedTrace, SelectionTrace, WindowTrace
from gpu_worker.engine.batch import Buckets
from gpu_worker.engine.sequence import Sequence as EngineSequence
from gpu_worker.policies import PQCache
from gpu_worker.policies.recall.base import Candidates


@dataclass(frozen=True, slots=True)
class ReplayedPQCache(PQCache):
    """traced: where a step finds the positions to attend, int64 [L, rows, H_kv, K], -1 for padding."""

    traced: list[Tensor] = field(default_factory=list)

    def select(self, index: Any, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        selected = PQCache.select(self, index, candidates, counts, width)
        if not self.traced:
            return selected
        return self.traced[0][candidates.layer, : selected.shape[0], :, : selected.shape[2]]


class Replayed:
    """A case's policy and the trace that it replays."""

    def __init__(self, case: DecodeCase, shape: ModelShape, device: torch.device) -> None:
        if case.policy != "pqcache":
            raise NotMeasurable(f"selections are replayed for pqcache, not for {case.policy}")
        self._case, self._shape, self._device = case, shape, device
        self.policy = ReplayedPQCache()
        self._recorded = None if case.trace is None else self._load(Path(case.trace))

    def _load(self, path: Path) -> RecordedTrace:
        case, recorded = self._case, RecordedTrace.load(path, self._device)
        assert case.budget_tokens is not None
        wanted = recorded.num_selected
        if self._num_selected(case.budget_tokens) != wanted:
            fits = (tokens for tokens in range(2, case.context) if self._num_selected(tokens) == wanted)
            raise NotMeasurable(
                f"the trace selects {wanted} positions, a budget of {case.budget_tokens} tokens selects "
                f"{self._num_selected(case.budget_tokens)}; --budget {next(fits, 'N')} would fit"
            )
        return recorded

    def _num_selected(self, budget_tokens: int) -> int | None:
        return self.policy.plan(self._case.context, budget_tokens).num_selected

    def prepare(self, running: Sequence[EngineSequence]) -> Callable[[int], None]:
        """Start to replay; the function writes the selection of step i, which is to be called before it."""
        plan = running[0].plan
        num_selected = plan.num_selected or 0
        buckets = Buckets(is_exact=self._device.type != "cuda")
        shape, batch = self._shape, self._case.batch
        # A full house has no padding.
        size = (shape.num_layers, batch, shape.num_kv_heads, buckets.width(num_selected))
        traced = torch.full(size, -1, dtype=torch.int64, device=self._device)
        candidates = range(plan.num_sink, running[0].window_begin - 1)
        trace = self._trace(candidates, num_selected)
        self.policy.traced.append(traced)
        count = 0

        def before(_: int) -> None:
            # The warm-up is over twice: of the engine, then of the clock.
            nonlocal count
            trace.select(count, traced[..., :num_selected])
            count += 1

        return before

    def _trace(self, candidates: range, num_selected: int) -> SelectionTrace:
        case = self._case
        if self._recorded is not None:
            return self._recorded.at(case.context, candidates)
        assert case.hit_rate is not None
        num_heads = self._shape.num_kv_heads
        return WindowTrace(case.batch, num_heads, candidates, num_selected, case.hit_rate, self._device)
