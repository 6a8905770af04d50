"""The interface of a retain policy, which keeps a part of every prefilled layer, or means of it, and forgets the rest.

Positions, slots and attention are the engine's. A policy sees one layer of one sequence at a time, on the model's
device, and may compress again while the sequence decodes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gpu_worker.policies.base import Family, Plan, Policy, StepAttention, StepQueries
from gpu_worker.row_format import keys_and_values


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer of one sequence as `compress` gets it: the whole prompt, or what is kept by now. It may be several
    layers that are compressed together, as one layer of more heads, the first layer's first.

    layer: from 0 to num_layers - 1, of those that are compressed; the first of several. num_tokens: the length of the
    context; more than the plan's prompt when the sequence decodes. keys, values: [H_kv, n, d], keys rotated. positions:
    int64 [H_kv, n], ascending; where heads keep unequal numbers of rows and the sequence decodes, -1 pads the shorter
    ones. queries: [H_q, w, d], rotated, of the last w tokens of the prompt, as many as the policy's `num_queries`; none
    when the sequence decodes. scale: of the model's attention. seed: of the request. notes: float32 [H_kv, n], of the
    last `Retained`, as the steps since have changed them; None at first. history: [H_kv, n, m] and rounds: of the last
    `Retained` of this layer, 0 for rows that came since. is_even: no head is padded, which is known without waiting
    for the device.
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
    notes: Tensor | None = None
    history: Tensor | None = None
    rounds: int = 0
    is_even: bool = False

    @classmethod
    def of_prompt(
        cls,
        layer: int,
        num_layers: int,
        rows: Tensor,
        queries: Tensor,
        scale: float,
        seed: int = 0,
        positions: Tensor | None = None,
    ) -> LayerRows:
        """A prefilled layer. rows: [H_kv, n, 2d], K then V. positions: int64 [H_kv, n], 0 to n - 1 in every head, if
        they are at hand."""
        num_tokens = rows.shape[1]
        if positions is None:
            positions = prompt_positions(rows)
        keys, values = keys_and_values(rows)
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
            notes=None if self.notes is None else self.notes[heads],
            history=None if self.history is None else self.history[heads],
        )


def prompt_positions(rows: Tensor) -> Tensor:
    """Return the positions of a prompt's rows [H_kv, n, 2d]: int64 [H_kv, n]."""
    return torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[0], -1)


@dataclass(frozen=True, slots=True)
class Retained:
    """The rows that are kept of a layer. Heads may keep unequal numbers S_h; the rest of a head's width is padding.

    positions: int64 [H_kv, S], ascending, then -1. A mean stands at one of its members' positions. keys, values:
    [H_kv, S, d] in the model's dtype. notes: float32 [H_kv, S], a number of the policy's own for each slot, which its
    steps read and change; a new token's is 0. history: [H_kv, S, m] of any type and rounds: any numbers that the policy
    gets back next time. is_even: certainly no padding, so that the host need not wait for the device to know.
    """

    positions: Tensor
    keys: Tensor
    values: Tensor
    notes: Tensor | None = None
    history: Tensor | None = None
    rounds: int = 0
    is_even: bool = False

    @classmethod
    def of(
        cls, rows: LayerRows, index: Tensor, notes: Tensor | None = None, is_even: bool = False
    ) -> Retained:
        """Rows unchanged. index: int64 [H_kv, S] into the rows, ascending, then -1 unless `is_even`. notes: float32
        [H_kv, n]; None: the rows' own."""
        taken = index if is_even else index.clamp(min=0)
        positions = rows.positions.gather(1, taken)
        wide = taken[..., None].expand(-1, -1, rows.keys.shape[2])
        history, notes = rows.history, rows.notes if notes is None else notes
        return cls(
            positions if is_even else positions.masked_fill(index < 0, -1),
            rows.keys.gather(1, wide),
            rows.values.gather(1, wide),
            None if notes is None else notes.gather(1, taken),
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

    positions: int64 [B, L, H_kv, S], -1 where a slot is empty. notes: float32, the same shape; None where no policy has
    any. begin, end: int64 [B]: sinks are below begin, the window is from end
    up. num_tokens: int64 [B], the position of the new tokens; -1 for padding.
    """

    positions: Tensor
    notes: Tensor | None
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


@dataclass(frozen=True, slots=True)
class Evicted:
    """slots: int64 [B, L, H_kv], the slot that each head gives to its new token. gift: where the evicted value goes, if
    anywhere."""

    slots: Tensor
    gift: Gift | None = None


@dataclass(frozen=True, slots=True)
class Recompression:
    """When a layer is compressed again while a sequence decodes.

    interval: after so many decoded tokens. together: what a head keeps depends on its rows, the plan and the budget
    only, and every layer has that budget, so that several layers may be compressed at once.
    """

    interval: int
    together: bool = False

    def mark(self, num_left: int) -> int:
        """The mark of a step after which the layers are compressed within `num_left` steps, itself included: what does
        not follow from tensors is computed here, on the host."""
        return 0


class KeptStep(StepAttention):
    """The default attention of a retain step: every slot that a head has filled, exactly."""

    @abstractmethod
    def notes(self, layer: int) -> Tensor:
        """float32 [seats, H_kv, S], to be read."""

    @abstractmethod
    def observe(self, layer: int, query: Tensor, note: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        """Let `note(notes, weights, marks)` change one layer's notes in place. notes, weights: float32 [B, H_kv, S];
        weights are the step's softmax weights, the mean over the group, 0 in empty slots. marks: int64 [B], what
        `Recompression.mark` said. query: [B, H_q, d]."""

    @abstractmethod
    def attend_kept(self, layer: int, query: Tensor, bias: Tensor | None = None) -> Tensor:
        """[B, H_q, d] to the same shape. bias: float32 [seats, H_kv, S], added to the scores."""

    def attend(self, layer: int, queries: StepQueries) -> Tensor:
        return self.attend_kept(layer, queries.own)


class RetainPolicy(Policy):
    """Compresses each layer once it is prefilled; while decoding it lets new tokens be appended, evicts a token at
    every step (`evicts`), or compresses again every so often (`recompression`).

    `Plan.num_selected` is the number of tokens kept between sinks and window.
    """

    family = Family.RETAIN

    # What is kept.

    # So many copies of a layer's keys as float32 `compress` has on a GPU at one time.
    key_copies: ClassVar[int] = 2

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        """Keep `budget` tokens of a layer for each KV head. plan: the request's."""
        return self.keep(rows, plan.of_layer(budget))

    def keep(self, rows: LayerRows, plan: Plan) -> Retained:
        """Keep `plan.num_kept` tokens for each KV head, the mean over the heads exactly. The rows are never fewer than
        that. plan: the layer's."""
        raise NotImplementedError(f"{self.name} must define `keep`")

    def layer_budget(self, plan: Plan, layer: int, num_layers: int) -> int:
        """Tokens kept in one layer by each KV head, the mean over its heads; over the layers the mean is the budget.

        Raises ValueError where the plan's budget cannot be kept so."""
        return plan.budget_tokens

    def most_kept(self, plan: Plan, budget: int, num_kv_heads: int) -> int:
        """Tokens that one head may keep of a layer's budget, at most."""
        return budget

    def room(self, plan: Plan, num_decoded: int) -> int:
        """Slots of a head beyond what it keeps, when so many tokens will be decoded; the new token's is one."""
        if self.evicts:
            return 1
        again = self.recompression(plan)
        return num_decoded if again is None else min(again.interval, num_decoded)

    # What leaves.

    # Gives up one slot of each head at every step, to the new token.
    evicts: ClassVar[bool] = False

    def evict(self, slots: StepSlots) -> Evicted:
        """For a policy that `evicts`; asked for full heads only, so that every head has an evictable slot; where it has
        none, any slot is an answer."""
        raise NotImplementedError(f"{self.name} evicts nothing while decoding")

    def recompression(self, plan: Plan) -> Recompression | None:
        """None: never."""
        return None

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        # If nothing leaves, all decoded tokens stay with the prompt's last tokens.
        leaves = self.evicts or self.recompression(plan) is not None
        return super().window_begin(plan, num_tokens if leaves else plan.num_prompt_tokens)

    # How a step is attended.

    def attention(self, step: KeptStep) -> StepAttention:
        """How a step is attended: as `step` does, or by an object that does more."""
        return step


class Observing(StepAttention):
    """Records every step's weights, and attends what is kept."""

    def __init__(self, step: KeptStep, note: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        """note: as for `KeptStep.observe`."""
        self._step = step
        self._note = note

    def attend(self, layer: int, queries: StepQueries) -> Tensor:
        self._step.observe(layer, queries.own, self._note)
        return self._step.attend(layer, queries)
