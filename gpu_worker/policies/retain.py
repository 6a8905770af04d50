"""What a retain policy is: it keeps a part of every prefilled layer, or means of it, and the rest is gone.

Positions, slots and attention are the engine's. A policy sees one layer of one sequence at a time, on the model's
device, and may be asked again while the sequence decodes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gpu_worker.kernels.best_rows import best_rows
from gpu_worker.policies.base import Family, Plan, Policy

LEAST, MOST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer of one sequence as `compress` gets it: the whole prompt, or what is kept by now. Where layers are
    treated alike it may be several, as one layer of more heads, the first layer's first.

    layer: from 0 to num_layers - 1, of those that are compressed; the first of several. num_tokens: the length of the
    context; more than the plan's prompt when the sequence decodes. keys, values: [H_kv, n, d], keys rotated. positions:
    int64 [H_kv, n], ascending; where heads keep unequal numbers of rows and the sequence decodes, -1 pads the shorter
    ones. queries: [H_q, w, d], rotated, of the last w tokens of the prompt, as many as the policy's `num_queries`; none
    when the sequence decodes. scale: of the model's attention. seed: of the request. degrees: float32 [H_kv, n], how
    many tokens a row stands for; None: one each. scores: float32 [H_kv, n], what `observe` has gathered; None at first.
    history: [H_kv, n, m] and rounds: what the last `Retained` of this layer said, 0 for rows that came since. is_even:
    no head is padded, and that is known without waiting for the device.
    """

    layer: int
    num_layers: int
    num_tokens: int
    keys: Tensor
    values: Tensor
    positions: Tensor
    queries: Tensor
    scale: float
    seed: int = 0
    degrees: Tensor | None = None
    scores: Tensor | None = None
    history: Tensor | None = None
    rounds: int = 0
    is_even: bool = False

    @classmethod
    def of_prompt(
        cls, layer: int, num_layers: int, rows: Tensor, queries: Tensor, scale: float, seed: int = 0
    ) -> LayerRows:
        """A prefilled layer. rows: [H_kv, n, 2d], K then V."""
        num_kv_heads, num_tokens, row = rows.shape
        positions = torch.arange(num_tokens, device=rows.device).expand(num_kv_heads, -1)
        keys, values = rows[..., : row // 2], rows[..., row // 2 :]
        return cls(layer, num_layers, num_tokens, keys, values, positions, queries, scale, seed, is_even=True)

    @property
    def group_size(self) -> int:
        return self.queries.shape[0] // self.keys.shape[0]

    def heads(self, heads: Tensor) -> LayerRows:
        """Only these KV heads, int64 [h], and their groups' queries."""
        return replace(
            self,
            keys=self.keys[heads],
            values=self.values[heads],
            positions=self.positions[heads],
            queries=self.queries.unflatten(0, (self.keys.shape[0], -1))[heads].flatten(0, 1),
            degrees=None if self.degrees is None else self.degrees[heads],
            scores=None if self.scores is None else self.scores[heads],
            history=None if self.history is None else self.history[heads],
        )


@dataclass(frozen=True, slots=True)
class Retained:
    """What stays of a layer. Heads may keep unequal numbers S_h; what lies beyond a head's is padding.

    positions: int64 [H_kv, S], ascending, then -1. A mean stands at one of its members' positions. keys, values:
    [H_kv, S, d] in the model's dtype. degrees, scores: float32 [H_kv, S], as in `LayerRows`. history: [H_kv, S, m] of
    any type and rounds: any numbers that the policy wants to be told next time. is_even: surely nothing is padding, so
    that nobody waits for the device to learn it.
    """

    positions: Tensor
    keys: Tensor
    values: Tensor
    degrees: Tensor | None = None
    scores: Tensor | None = None
    history: Tensor | None = None
    rounds: int = 0
    is_even: bool = False

    @classmethod
    def of(
        cls, rows: LayerRows, index: Tensor, scores: Tensor | None = None, is_even: bool = False
    ) -> Retained:
        """Rows unchanged. index: int64 [H_kv, S] into the rows, ascending, then -1 unless `is_even`. scores: float32
        [H_kv, n]."""
        taken = index if is_even else index.clamp(min=0)
        positions = rows.positions.gather(1, taken)
        wide = taken[..., None].expand(-1, -1, rows.keys.shape[2])
        history = rows.history
        return cls(
            positions if is_even else positions.masked_fill(index < 0, -1),
            rows.keys.gather(1, wide),
            rows.values.gather(1, wide),
            None if rows.degrees is None else rows.degrees.gather(1, taken),
            None if scores is None else scores.gather(1, taken),
            None if history is None else history.gather(1, taken[..., None].expand(-1, -1, history.shape[2])),
            rows.rounds,
            is_even,
        )

    @property
    def counts(self) -> Tensor:
        """S_h: int64 [H_kv]."""
        return (self.positions >= 0).sum(dim=1)

    def counts_on_host(self) -> list[int]:
        """S_h of every head; waits for the device unless all are surely equal."""
        num_heads, width = self.positions.shape
        return [width] * num_heads if self.is_even else self.counts.tolist()


@dataclass(frozen=True, slots=True)
class StepSlots:
    """The slots of B sequences in some layers when a step begins, before its new tokens have any.

    positions: int64 [B, L, H_kv, S], -1 where a slot is empty. scores: float32, the same shape, what `observe` has
    gathered; only for a policy that observes. begin, end: int64 [B]: sinks are below begin, the window is from end
    up. num_tokens: int64 [B], the position of the new tokens; -1 for padding.
    """

    positions: Tensor
    scores: Tensor | None
    begin: Tensor
    end: Tensor
    num_tokens: Tensor

    @property
    def is_evictable(self) -> Tensor:
        """Tokens between sinks and window: bool [B, L, H_kv, S]."""
        begin, end = self.begin[:, None, None, None], self.end[:, None, None, None]
        return (self.positions >= begin) & (self.positions < end)


@dataclass(frozen=True, slots=True)
class Gift:
    """slots: int64 [B, L, H_kv, m], the slots of a head whose values gain `share`, float32 [B, L, H_kv], of the value
    in the slot that is given up; -1: none."""

    slots: Tensor
    share: Tensor


class RetainPolicy(Policy):
    """Compresses each layer once it is prefilled; while decoding it lets new tokens be appended, evicts a token at
    every step (`evicts`), or compresses again every so often (`interval`).

    `Plan.num_selected` is the number of tokens kept between sinks and window.
    """

    family = Family.RETAIN
    # Gives up one slot of each head at every step, to the new token.
    evicts: ClassVar[bool] = False
    # Wants the softmax weights of every step.
    observes: ClassVar[bool] = False
    # What an evicted token's value was worth goes to others (`give`).
    gives: ClassVar[bool] = False
    # Rows may stand for several tokens: attention adds the logarithm of their degrees to the scores.
    has_degrees: ClassVar[bool] = False
    # What a head keeps depends on its rows, the plan and the budget only, and every layer has that budget: several may
    # be compressed at once.
    treats_layers_alike: ClassVar[bool] = False
    # So many of the sinks, if there are as many, are turned on at every step by as many positions as are missing
    # behind them: the query finds all that is kept at neighbouring positions.
    num_shifted: ClassVar[int] = 0

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        # Where nothing is evicted, all that is decoded stays with the prompt's last tokens.
        end = num_tokens if self.evicts else plan.num_prompt_tokens
        return max(plan.num_sink, end - plan.num_recent)

    def layer_budget(self, plan: Plan, layer: int, num_layers: int) -> int:
        """Tokens kept in one layer by each KV head, the mean over its heads; over the layers the mean is the budget.

        Raises ValueError where the plan's budget cannot be kept so."""
        return plan.budget_tokens

    def most_kept(self, plan: Plan, budget: int, num_kv_heads: int) -> int:
        """Tokens that one head may keep of a layer's budget, at most."""
        return budget

    def interval(self, plan: Plan) -> int:
        """Tokens decoded until `compress` is called again; 0: never."""
        return 0

    def mark(self, plan: Plan, num_left: int) -> int:
        """A number that `observe` is told of a step after which the layers are compressed within `num_left` steps, its
        own among them; what does not follow from tensors is said here, on the host."""
        return 0

    def room(self, plan: Plan, num_decoded: int) -> int:
        """Slots of a head beyond what it keeps, when so many tokens will be decoded; the new token's is one."""
        if self.evicts:
            return 1
        interval = self.interval(plan)
        return min(interval, num_decoded) if interval else num_decoded

    @abstractmethod
    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        """Keep `budget` tokens for each KV head, sinks and window included, the mean over the heads exactly. The rows
        are never fewer than that."""

    def evict(self, slots: StepSlots) -> Tensor:
        """The slot of each head that its new token takes: int64 [B, L, H_kv]. For a policy that `evicts`; asked for
        full heads only, so that every head has an evictable slot; where it has none, any slot is an answer."""
        raise NotImplementedError(f"{self.name} evicts nothing while decoding")

    def give(self, slots: StepSlots, evicted: Tensor) -> Gift:
        """Where the values of evicted slots int64 [B, L, H_kv] go. For a policy that `gives`."""
        raise NotImplementedError(f"{self.name} gives up values for good")

    def observe(self, scores: Tensor, weights: Tensor, marks: Tensor) -> None:
        """Add a step to the scores of one layer, in place.

        scores, weights: float32 [B, H_kv, S]; weights are softmax weights, the mean over the group, 0 in empty slots.
        A new token's score was 0 before. marks: int64 [B], what `mark` said of the step.
        """
        raise NotImplementedError(f"{self.name} observes nothing while decoding")


class ScoredPolicy(RetainPolicy):
    """Keeps sinks, window, and in between the tokens that score best."""

    @abstractmethod
    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        """Of every row; what sinks and window score is not read. plan: the layer's, by its own budget."""

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        plan = plan.of_layer(budget)
        return keep_best(rows, plan, self.score(rows, plan))


@dataclass(frozen=True, slots=True)
class Scores:
    """first: float32 [H_kv, n], the larger, the sooner kept. second: float32 [H_kv, n], for ties; then the higher
    position goes first. kept: float32 [H_kv, n], what `observe` goes on with; None where the policy does not observe.
    """

    first: Tensor
    second: Tensor | None = None
    kept: Tensor | None = None


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
    return Retained.of(rows, best_rows(first, counts, int(counts.max()), scores.second), scores.kept)


def _keep_even(rows: LayerRows, plan: Plan, scores: Scores) -> Retained:
    """The same where nothing is padded: sinks are the first rows and the window is the last. Nothing waits."""
    num_heads, num_rows = rows.positions.shape
    begin, end, num_best = plan.num_sink, num_rows - plan.num_recent, plan.num_selected or 0
    second = None if scores.second is None else scores.second[:, begin:end]
    counts = torch.full((num_heads,), num_best, device=rows.positions.device)
    best = best_rows(scores.first[:, begin:end], counts, num_best, second)
    every = torch.arange(num_rows, device=best.device).expand(num_heads, -1)
    index = torch.cat([every[:, :begin], best + begin, every[:, end:]], dim=1)
    return Retained.of(rows, index, scores.kept, is_even=True)


def finite(scores: Tensor) -> Tensor:
    """Scores as they are ranked: what is there can be taken, also where a model overflows."""
    return scores.nan_to_num(nan=LEAST, posinf=MOST, neginf=LEAST)
