"""Outlier heads: some KV heads keep everything, and all others pay for it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_worker.policies.base import Plan
from gpu_worker.policies.hyper_parameters import Share
from gpu_worker.policies.retain import LayerRows, Retained, RetainPolicy
from gpu_worker.policies.wrapper import AllocationPolicy


@dataclass(frozen=True, slots=True)
class OutlierHeads(AllocationPolicy):
    """Outlier heads keep all tokens; the others share what is left of the budget (Hu et al., Chelsea, section 5.4).

    Appendix B says how a calibration finds them. With a share f of outliers, a budget R of the prompt becomes
    (R - f) / (1 - f) for the other heads, equally where the inner policy's layers are equal.

    Goes outside every other allocation. `layer_budget` moves the budget between layers, as layers have unequal numbers
    of outliers; `keep` splits a layer's. That leaves less than a token a head unspent.

    inner: the policy of the others, and of the outliers with a budget of all that they have. heads: (layer, KV head),
    layers counted as in `LayerRows`. num_kv_heads: of a layer of the model. share: of all KV heads, those that the
    calibration's file is asked for.
    """

    inner: RetainPolicy
    heads: frozenset[tuple[int, int]]
    num_kv_heads: int
    share: Share = 0.04

    def __post_init__(self) -> None:
        if self.inner.evicts:
            raise ValueError(
                f"{self.inner.name} evicts at every step, and outlier heads keep what is decoded"
            )
        unknown = sorted(head for head in self.heads if min(head) < 0 or head[1] >= self.num_kv_heads)
        if unknown:
            raise ValueError(
                f"no (layer, KV head) {unknown}: a layer's heads are 0 to {self.num_kv_heads - 1}"
            )

    @property
    def name(self) -> str:
        return f"{self.inner.name}+outliers"

    def layer_budget(self, plan: Plan, layer: int, num_layers: int) -> int:
        """Raises ValueError when sinks, window and one token more of every other head do not fit with the outliers, or
        an outlier's layer is not there."""
        budgets = [self.inner.layer_budget(plan, one, num_layers) for one in range(num_layers)]
        if not plan.selects:
            return budgets[layer]
        fewest = plan.num_sink + plan.num_recent + 1
        num_whole = self._num_whole(num_layers)
        num_others = [self.num_kv_heads - whole for whole in num_whole]
        # Means over the heads of each layer: what it cannot do without, rounded up, and a part of what is left.
        needed = [
            -(-(whole * plan.num_prompt_tokens + others * fewest) // self.num_kv_heads)
            for whole, others in zip(num_whole, num_others, strict=True)
        ]
        spare = sum(budgets) - sum(needed)
        if spare < 0:
            raise ValueError(
                f"{len(self.heads)} outlier heads of {num_layers * self.num_kv_heads} keep all of "
                f"{plan.num_prompt_tokens} tokens and the others at least {fewest}: that needs a budget of "
                f"{-(-sum(needed) // num_layers)} tokens, and it is {plan.budget_tokens}; "
                "ask for a larger one or name fewer outlier heads"
            )
        wishes = [
            others * max(0, budget - fewest) for others, budget in zip(num_others, budgets, strict=True)
        ]
        # Differences of rounded sums: nothing is lost between layers.
        ends = [spare * wished // max(1, sum(wishes)) for wished in accumulate(wishes, initial=0)]
        return needed[layer] + ends[layer + 1] - ends[layer]

    def most_kept(self, plan: Plan, budget: int, num_kv_heads: int) -> int:
        return plan.num_prompt_tokens

    def room(self, plan: Plan, num_decoded: int) -> int:
        # An outlier head keeps what is decoded, however often the others are compressed.
        return 1 if self.evicts else num_decoded

    def keep(self, rows: LayerRows, plan: Plan) -> Retained:
        whole = sorted(head for layer, head in self.heads if layer == rows.layer)
        others = [head for head in range(self.num_kv_heads) if head not in whole]
        if not whole:
            return self.inner.keep(rows, plan)
        device = rows.keys.device
        outliers = rows.heads(torch.tensor(whole, device=device))
        num_rows = int((outliers.positions >= 0).sum(dim=1).max())
        all_rows = self.inner.keep(outliers, plan.of_layer(num_rows))
        if not others:
            return all_rows
        # By the prompt: while decoding, outlier heads grow beyond the budget and the others stay as they are.
        left = self.num_kv_heads * plan.num_kept - len(whole) * plan.num_prompt_tokens
        compressed = rows.heads(torch.tensor(others, device=device))
        rest = self.inner.keep(compressed, plan.of_layer(min(left // len(others), num_rows)))
        return _together(all_rows, rest, torch.tensor(whole + others, device=device).argsort())

    def _num_whole(self, num_layers: int) -> list[int]:
        """Outlier heads of each layer."""
        num_whole = [0] * num_layers
        for layer, head in self.heads:
            if layer >= num_layers:
                raise ValueError(
                    f"outlier head {head} of layer {layer}: only {num_layers} layers are compressed; "
                    "calibrate with this model and as many dense layers"
                )
            num_whole[layer] += 1
        return num_whole


def _together(first: Retained, second: Retained, order: Tensor) -> Retained:
    """Heads of both, the shorter ones padded, then in this order: int64 [H_kv]."""
    width = max(first.positions.shape[1], second.positions.shape[1])

    def joined(one: Tensor, other: Tensor, padding: float) -> Tensor:
        padded = [
            pad(part.transpose(1, -1), (0, width - part.shape[1]), value=padding).transpose(1, -1)
            for part in (one, other)
        ]
        return torch.cat(padded)[order]

    def joined_if_any(one: Tensor | None, other: Tensor | None, padding: float) -> Tensor | None:
        return None if one is None or other is None else joined(one, other, padding)

    return Retained(
        joined(first.positions, second.positions, -1),
        joined(first.keys, second.keys, 0),
        joined(first.values, second.values, 0),
        joined_if_any(first.notes, second.notes, 0),
        joined_if_any(first.history, second.history, 0),
        max(first.rounds, second.rounds),
    )
