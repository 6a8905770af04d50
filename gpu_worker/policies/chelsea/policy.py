"""Chelsea: tokens whose keys are nearly the same become one, and attention counts it as many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from gpu_worker.policies.base import Plan, StepAttention, StepQueries
from gpu_worker.policies.chelsea.soft_matching import WeightedRows, merge_rows, num_matches
from gpu_worker.policies.hyper_parameters import Between, SomeTokens, Tokens
from gpu_worker.policies.retain import KeptStep, LayerRows, Recompression, Retained, RetainPolicy


@dataclass(frozen=True, slots=True)
class Chelsea(RetainPolicy):
    """Means of similar tokens, merged in rounds within chunks (Hu et al., Chelsea, section 5).

    It compresses again every `interval_tokens` while the sequence decodes.

    num_sink, num_recent: first and last tokens, never merged. chunk: tokens that are matched among themselves. A round
    removes a share r of what lies between sinks and window (CH-A1): r_init at first, less by alpha after each of the
    first `decay_rounds` (m) rounds, counted over the request (CH-A2), but never below r_min (CH-A4). The defaults are
    those for Llama 3; Llama 2 has 0.45, 0.05, 3, Qwen2 0.2, 0.1, 2. interval_tokens: g, tokens decoded until it
    compresses again (CH-A5). chunked: False is the paper's ablation, `chelsea+unchunked`: one chunk of everything
    between sinks and window.
    """

    num_sink: Tokens = 16
    num_recent: Tokens = 64
    chunk: Annotated[int, Between(2, 4096)] = 256
    r_init: Annotated[float, Between(0, 0.5)] = 0.35
    alpha: Annotated[float, Between(0, 0.5)] = 0.1
    decay_rounds: Annotated[int, Between(0, 1000)] = 2
    r_min: Annotated[float, Between(0, 0.5)] = 0.05
    interval_tokens: SomeTokens = 128
    chunked: bool = True

    key_copies = 7

    def __post_init__(self) -> None:
        if not 0 < self.r_min <= self.r_init <= 0.5:
            raise ValueError(f"r_min {self.r_min}, r_init {self.r_init}: keep 0 < r_min <= r_init <= 0.5")

    @property
    def name(self) -> str:
        return "chelsea" + "+unchunked" * (not self.chunked)

    def split(self, plan: Plan) -> Plan:
        return replace(plan.split_by_number(self.num_sink, self.num_recent), has_means=True)

    def recompression(self, plan: Plan) -> Recompression | None:
        return Recompression(self.interval_tokens, together=True) if plan.selects else None

    def attention(self, step: KeptStep) -> StepAttention:
        return _WithDegrees(step)

    def keep(self, rows: LayerRows, plan: Plan) -> Retained:
        num_rows, dtype = _num_rows(rows), rows.keys.dtype
        begin, end = plan.num_sink, num_rows - plan.num_recent
        wanted = plan.num_selected or 0
        if wanted < 1:
            raise ValueError(
                f"{plan.num_sink} sinks and {plan.num_recent} tokens in the window leave none for means; "
                f"let each layer keep at least {plan.num_kept + 1} tokens"
            )
        middle, rounds = _between(rows, begin, end), rows.rounds
        while (num_middle := middle.keys.shape[1]) > wanted:
            # The last round lands on this number (CH-A3); it is the same number in every head (CH-A7).
            removed = max(1, int(self._ratio(rounds) * num_middle + 1e-6))
            # One of everything is no shorter than a chunk: kernels are compiled for each length that there is.
            chunk = self.chunk if self.chunked else max(self.chunk, num_middle)
            num_merged = min(removed, num_middle - wanted, num_matches(num_middle, chunk))
            # Means of means are not rounded between the rounds.
            is_last = num_middle - num_merged == wanted
            middle = merge_rows(middle, chunk, num_merged, dtype if is_last else torch.float32)
            rounds += 1
        parts = _between(rows, 0, begin), middle, _between(rows, end, num_rows)
        return Retained(
            torch.cat([part.positions for part in parts], dim=1),
            torch.cat([part.keys for part in parts], dim=1),
            torch.cat([part.values for part in parts], dim=1),
            torch.cat([part.degrees for part in parts], dim=1).clamp_(min=1.0).log_(),
            rounds=rounds,
            is_even=rows.is_even,
        )

    def _ratio(self, rounds: int) -> float:
        """Share of the middle that the next round removes."""
        return max(self.r_min, self.r_init - self.alpha * min(self.decay_rounds, rounds))


class _WithDegrees(StepAttention):
    """A mean counts as often as the tokens that it stands for."""

    def __init__(self, step: KeptStep) -> None:
        self._step = step

    def attend(self, layer: int, queries: StepQueries) -> Tensor:
        return self._step.attend_kept(layer, queries.own, bias=self._step.notes(layer))


def _between(rows: LayerRows, begin: int, end: int) -> WeightedRows:
    taken = slice(begin, end)
    positions = rows.positions[:, taken]
    # A slot's note is the logarithm of how many tokens it stands for.
    degrees = torch.ones_like(positions, dtype=torch.float32)
    if rows.notes is not None:
        degrees = rows.notes[:, taken].exp().round()
    return WeightedRows(positions, degrees, rows.keys[:, taken], rows.values[:, taken])


def _num_rows(rows: LayerRows) -> int:
    """Return the number of rows that every head keeps."""
    if rows.is_even:
        return rows.positions.shape[1]
    return int((rows.positions >= 0).sum(dim=1).max())
