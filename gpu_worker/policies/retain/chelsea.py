"""Chelsea: tokens whose keys are nearly the same become one, and attention counts it as many."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from gpu_worker.policies.base import Plan, Policy, sink_tokens, split_budget
from gpu_worker.policies.retain.base import LayerRows, Retained, RetainPolicy, best_first
from gpu_worker.policies.retain.soft_matching import Matches, match_rows, num_matches


@dataclass(frozen=True, slots=True)
class Chelsea(RetainPolicy):
    """Chunked soft matching, in rounds, until the budget is met; again every so often while the sequence decodes (Hu et
    al., Efficient long-context LLM inference via KV cache clustering, section 5).

    num_sink, num_recent: first and last tokens, never merged. chunk: tokens that are matched among themselves. A round
    removes a share r of what lies between sinks and window (CH-A1): r_init at first, less by alpha after each of the
    first `decay_rounds` (m) rounds, counted over the request (CH-A2), but never below r_min (CH-A4). The defaults are
    those for Llama 3; Llama 2 has 0.45, 0.05, 3, Qwen2 0.2, 0.1, 2. interval_tokens: g, tokens decoded until it
    compresses again (CH-A5). chunked: False is the paper's ablation, `chelsea+unchunked`: one chunk of everything
    between sinks and window.
    """

    num_sink: int = 16
    num_recent: int = 64
    chunk: int = 256
    r_init: float = 0.35
    alpha: float = 0.1
    decay_rounds: int = 2
    r_min: float = 0.05
    interval_tokens: int = 128
    chunked: bool = True

    has_degrees = True
    treats_layers_alike = True

    def __post_init__(self) -> None:
        if self.chunk < 2:
            raise ValueError(f"chunk is {self.chunk}; it takes 2 tokens to merge one into the other")
        if not 0 < self.r_min <= self.r_init <= 0.5:
            raise ValueError(f"r_min {self.r_min}, r_init {self.r_init}: keep 0 < r_min <= r_init <= 0.5")
        if self.interval_tokens < 1:
            raise ValueError(f"interval_tokens is {self.interval_tokens}; give at least 1")

    @property
    def name(self) -> str:
        return "chelsea" + "+unchunked" * (not self.chunked)

    def ablations(self) -> tuple[Policy, ...]:
        return (replace(self, chunked=False),)

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        num_sink = sink_tokens(self.num_sink, budget_tokens)
        # At least as many tokens of a small budget stand for the middle as are in the window.
        num_recent = min(self.num_recent, (budget_tokens - num_sink) // 2)
        return split_budget(num_prompt_tokens, budget_tokens, num_sink, num_recent)

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        # What was decoded long ago is merged like the prompt.
        return max(plan.num_sink, num_tokens - plan.num_recent)

    def interval(self, plan: Plan) -> int:
        return self.interval_tokens if plan.selects else 0

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        num_rows = int((rows.positions >= 0).sum(dim=1).max())
        begin, end = plan.num_sink, num_rows - plan.num_recent
        wanted = budget - plan.num_sink - plan.num_recent
        if wanted < 1:
            raise ValueError(
                f"a budget of {budget} tokens leaves none beside {plan.num_sink} sinks and {plan.num_recent} "
                f"in the window; give at least {budget - wanted + 1}"
            )
        middle, rounds = _Rows.between(rows, begin, end), rows.rounds
        while (num_middle := middle.keys.shape[1]) > wanted:
            # The last round lands on the budget (CH-A3); it is the same number in every head (CH-A7).
            removed = max(1, int(self._ratio(rounds) * num_middle + 1e-6))
            chunk = self.chunk if self.chunked else num_middle
            num_merged = min(removed, num_middle - wanted, num_matches(num_middle, chunk))
            middle = middle.merged(match_rows(middle.keys, chunk), num_merged)
            rounds += 1
        sinks, recent = _Rows.between(rows, 0, begin), _Rows.between(rows, end, num_rows)
        parts = (sinks, middle, recent)
        return Retained(
            torch.cat([part.positions for part in parts], dim=1),
            torch.cat([part.keys.to(rows.keys.dtype) for part in parts], dim=1),
            torch.cat([part.values.to(rows.values.dtype) for part in parts], dim=1),
            torch.cat([part.degrees for part in parts], dim=1),
            rounds=rounds,
        )

    def _ratio(self, rounds: int) -> float:
        """Share of the middle that the next round removes."""
        return max(self.r_min, self.r_init - self.alpha * min(self.decay_rounds, rounds))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of every head by ascending position: int64 and float32 [H, M] and, in float32, [H, M, d]."""

    positions: Tensor
    degrees: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def between(cls, rows: LayerRows, begin: int, end: int) -> _Rows:
        taken = slice(begin, end)
        positions = rows.positions[:, taken]
        # Whole numbers, though the engine keeps their logarithms.
        degrees = torch.ones_like(positions, dtype=torch.float32)
        if rows.degrees is not None:
            degrees = rows.degrees[:, taken].round()
        return cls(positions, degrees, rows.keys[:, taken].float(), rows.values[:, taken].float())

    def merged(self, matches: Matches, num_merged: int) -> _Rows:
        """Merge so many rows of each head into their partners, the most similar ones. Means are weighted by
        degrees and stand where the partner stood (CH-A6)."""
        best = best_first(matches.similarity)[:, :num_merged]
        source, target = matches.source[best], matches.partner.gather(1, best)
        gained = self.degrees.gather(1, source)
        degrees = self.degrees.scatter_add(1, target, gained)
        num_heads, num_rows = degrees.shape
        # One bag a row, of what is merged into it. Its sum has an order, as that of a scatter on a GPU has not.
        first = torch.arange(num_heads, device=source.device)[:, None] * num_rows
        into, order = (target + first).flatten().sort(stable=True)
        bags = torch.searchsorted(into, torch.arange(num_heads * num_rows, device=into.device))
        members = (source + first).flatten()[order]
        shares = (gained / degrees.gather(1, target)).flatten()[order]
        own_share = (self.degrees / degrees)[..., None]

        def mean(of: Tensor) -> Tensor:
            flat = of.flatten(0, 1)
            added = embedding_bag(members, flat, bags, mode="sum", per_sample_weights=shares)
            return of * own_share + added.view_as(of)

        stays = torch.ones_like(degrees, dtype=torch.bool).scatter_(1, source, False)
        survivors = stays.nonzero()[:, 1].view(num_heads, -1)
        means = replace(self, degrees=degrees, keys=mean(self.keys), values=mean(self.values))
        return means.taken(survivors)

    def taken(self, index: Tensor) -> _Rows:
        wide = index[..., None].expand(-1, -1, self.keys.shape[2])
        return _Rows(
            self.positions.gather(1, index),
            self.degrees.gather(1, index),
            self.keys.gather(1, wide),
            self.values.gather(1, wide),
        )
