"""Scissorhands: drops, many at a time, the tokens that queries most often pass over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_worker.policies.base import Plan, StepAttention
from gpu_worker.policies.hyper_parameters import Between, SplitShare
from gpu_worker.policies.observed import group_mean, weight_tiles
from gpu_worker.policies.retain import KeptStep, LayerRows, Observing, Recompression, Retained
from gpu_worker.policies.scored import ScoredPolicy, Scores

# While decoding a score is two counters in one: this times the steps in the windows of all calls to come but the last
# that has any, and those in its window too. Neither exceeds w, so that the sum is exact in float32.
EVERY = 1 << 12


@dataclass(frozen=True, slots=True)
class HalfDropped(Recompression):
    """window_size: queries w that a call's counters look back on."""

    window_size: int = 0

    @property
    def num_later(self) -> int:
        """Calls after the next one whose windows reach back before it; all but the last of them have every step since
        the call before it."""
        return (self.window_size - 1) // self.interval

    def mark(self, num_left: int) -> int:
        if num_left > self.window_size:
            return 0
        is_in_last = self.num_later and num_left + self.num_later * self.interval <= self.window_size
        return EVERY + 1 if is_in_last else EVERY


@dataclass(frozen=True, slots=True)
class Scissorhands(ScoredPolicy):
    """Tokens that recent queries seldom ignore, and a window (Liu et al., Scissorhands, section 4).

    A token's counter is the number of recent queries whose weight on it was below 1/t, t the tokens that the query
    sees; those with the largest counters are evicted first. Choice B-A1: no sinks, and a layer keeps B tokens as soon
    as the prompt is prefilled.

    window_size: queries w that the counter looks back on. recent_ratio: the most recent tokens, as a share of the
    prompt, that never go; at most a quarter of B.

    While decoding, B/2 tokens go at once, every B/2 tokens, by counters of just the last w queries. The next call is
    foreseen: queries before its window are not counted, and where w tokens take several calls, what is counted by now
    is kept apart for each call whose window reaches back so far. A layer may grow to B + B/2 until the first such call,
    the decoded tokens on top of B as in every one-shot method; that call and all later ones leave B - B/2, which
    refills to B, the token being decoded included.
    """

    window_size: Annotated[int, Between(1, EVERY - 1)] = 400
    recent_ratio: SplitShare = 0.01

    name = "scissorhands"

    def split(self, plan: Plan) -> Plan:
        wanted = int(plan.num_prompt_tokens * self.recent_ratio)
        return plan.split(num_recent=min(wanted, plan.num_kept // 4))

    def num_queries(self, plan: Plan) -> int:
        return min(self.window_size, plan.num_prompt_tokens)

    def recompression(self, plan: Plan) -> HalfDropped | None:
        return (
            HalfDropped(max(1, plan.budget_tokens // 2), window_size=self.window_size)
            if plan.selects
            else None
        )

    def keep(self, rows: LayerRows, plan: Plan) -> Retained:
        if rows.num_tokens == plan.num_prompt_tokens:
            retained = super(Scissorhands, self).keep(rows, plan)
            return replace(retained, history=self._seen_by_next(rows, plan, retained.positions))
        rows = replace(rows, history=self._gathered(rows, plan))
        retained = super(Scissorhands, self).keep(rows, plan.of_layer(plan.num_kept - plan.num_kept // 2))
        assert retained.history is not None
        return replace(retained, history=pad(retained.history[..., 1:], (0, 1)))

    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        if rows.history is not None:
            counters = rows.history[..., 0].float()
        elif rows.notes is None:
            counters = self._counted(rows)
        else:
            # In a wrapper that keeps no history: all since the prompt.
            return Scores(-rows.notes, notes=rows.notes)
        return Scores(-counters, notes=torch.zeros_like(counters))

    def attention(self, step: KeptStep) -> StepAttention:
        return Observing(step, self.observe)

    @staticmethod
    def observe(notes: Tensor, weights: Tensor, marks: Tensor) -> None:
        # Only slots with a token have a weight.
        average = 1 / (weights > 0).sum(dim=-1, keepdim=True)
        notes.add_((weights < average) * marks[:, None, None])

    def _dropped(self, plan: Plan) -> HalfDropped:
        dropped = self.recompression(plan)
        assert dropped is not None, "nothing is compressed where all is attended"
        return dropped

    def _gathered(self, rows: LayerRows, plan: Plan) -> Tensor:
        """Counters at this call, and what is in those of the calls after it by now: int16 [H_kv, n, 1 + later]."""
        num_later = self._dropped(plan).num_later
        assert rows.notes is not None
        assert rows.history is not None
        in_all = (rows.notes / EVERY).floor()
        steps = [in_all] * max(1, num_later)
        if num_later:
            steps.append(rows.notes - in_all * EVERY)
        return rows.history + torch.stack(steps, dim=-1).short()

    def _seen_by_next(self, rows: LayerRows, plan: Plan, positions: Tensor) -> Tensor:
        """Return what the prompt's queries leave in the counters of the first call and those after it, for positions
        int64 [H_kv, S]: int16 [H_kv, S, 1 + later]."""
        dropped = self._dropped(plan)
        num_later, interval = dropped.num_later, dropped.interval
        calls = torch.arange(1, num_later + 2, device=positions.device)
        seen = torch.zeros(*positions.shape, num_later + 1, device=positions.device)
        if num_later:
            for is_below, last in self._below_average(rows):
                is_seen = last[:, None] >= rows.num_tokens + calls * interval - self.window_size
                at = positions.clamp(min=0)[:, None].expand(-1, len(last), -1)
                seen += is_below.gather(2, at).float().transpose(1, 2) @ is_seen.float()
        return seen.short()

    def _counted(self, rows: LayerRows) -> Tensor:
        """The prompt's last queries, each counted fully: float32 [H_kv, n]."""
        counters = torch.zeros(rows.keys.shape[:2], device=rows.keys.device)
        for is_below, _last in self._below_average(rows):
            counters += is_below.sum(dim=1)
        return counters

    @staticmethod
    def _below_average(rows: LayerRows) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the prompt's last queries, a few at a time: whether each weighs a token that it sees below the average,
        bool [H_kv, t, n], and their positions, int64 [t]."""
        every = torch.arange(rows.keys.shape[1], device=rows.keys.device)
        for weights, positions in weight_tiles(rows):
            last = positions[0]
            # The mean over the group is compared, for while decoding nothing else is known.
            mean = group_mean(weights, rows.keys.shape[0])
            yield (mean < 1 / (last[:, None] + 1)) & (every <= last[:, None]), last
