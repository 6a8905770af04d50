"""Retain policies that score tokens: the best are kept between sinks and window."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_worker.kernels.best_rows import best_rows
from gpu_worker.policies.base import Plan
from gpu_worker.policies.retain import LayerRows, Retained, RetainPolicy

LEAST, MOST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max


class ScoredPolicy(RetainPolicy):
    """Keeps sinks, window, and in between the tokens that score best."""

    @abstractmethod
    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        """Scores of every row; those of sinks and window are not read. plan: the layer's."""

    def keep(self, rows: LayerRows, plan: Plan) -> Retained:
        return keep_best(rows, plan, self.score(rows, plan))


@dataclass(frozen=True, slots=True)
class Scores:
    """first: float32 [H_kv, n], the larger, the sooner kept. second: float32 [H_kv, n], for ties; then the higher
    position goes first. notes: float32 [H_kv, n], of what is kept; None: the rows' own.
    """

    first: Tensor
    second: Tensor | None = None
    notes: Tensor | None = None


def keep_best(rows: LayerRows, plan: Plan, scores: Scores, counts: Tensor | None = None) -> Retained:
    """Sinks, window, and `counts` int64 [H_kv] tokens of each head between them; None: the plan's number of each. None
    may exceed what is there."""
    first = finite(scores.first)
    if rows.is_even and counts is None:
        return _keep_even(rows, plan, replace(scores, first=first))
    window_begin = rows.num_tokens - plan.num_recent
    is_there = rows.positions >= 0
    is_fixed = is_there & ((rows.positions < plan.num_sink) | (rows.positions >= window_begin))
    first = first.masked_fill(is_fixed, float("inf")).masked_fill(~is_there, float("-inf"))
    counts = is_fixed.sum(dim=1) + (plan.num_selected or 0 if counts is None else counts)
    return Retained.of(rows, best_rows(first, counts, int(counts.max()), scores.second), scores.notes)


def _keep_even(rows: LayerRows, plan: Plan, scores: Scores) -> Retained:
    """The same without padding: sinks are the first rows and the window is the last. Does not wait for the device.
    scores: of which the first may be written."""
    end, num_fixed = rows.positions.shape[1] - plan.num_recent, plan.num_sink + plan.num_recent
    if plan.num_sink:
        scores.first[:, : plan.num_sink].fill_(float("inf"))
    if plan.num_recent:
        scores.first[:, end:].fill_(float("inf"))
    index = best_rows(scores.first, None, num_fixed + (plan.num_selected or 0), scores.second)
    return Retained.of(rows, index, scores.notes, is_even=True)


def finite(scores: Tensor) -> Tensor:
    """Scores as they are ranked: finite, so that every row can be taken even where a model overflows."""
    return scores.nan_to_num(nan=LEAST, posinf=MOST, neginf=LEAST)
