"""One decode step of recall sequences: select, make resident, attend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_worker.caches.base import GroupStep
from gpu_worker.caches.probe import Observation
from gpu_worker.caches.recall.fixed_slots import fixed_positions
from gpu_worker.caches.recall.selection import RecallParts, Selection
from gpu_worker.policies.base import StepQueries
from gpu_worker.policies.recall import Leaving, RecallPolicy
from gpu_worker.state.batch import Group
from gpu_worker.state.sequence import Sequence


class RecallStep(GroupStep):
    """The sequences of a group share a policy, and either all or none of them may miss."""

    def __init__(self, group: Group, policy: RecallPolicy, index: Any, parts: RecallParts) -> None:
        """index: the policy's state of all seats; None where the store selects."""
        self.group = group
        self._parts = parts
        if parts.in_store is None:
            # Before the slots of what leaves may become another's.
            every = range(parts.shape.num_layers)
            policy.extend(index, Leaving(group.lanes.seats, every, group.lanes.leaving, self._leaving_keys))
        places = parts.hot if group.shape.can_miss else parts.whole
        self.new_slots = places.place(group.lanes)
        parts.fixed.take_in(group.lanes, self.new_slots)
        self._selection = Selection(group, policy, index, parts)
        self._measured = [row for row, one in enumerate(group.sequences) if one.request.measure]
        # Query, new rows, output and selection of each layer, for the probe.
        self._seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def attend(self, layer: int, queries: StepQueries) -> Tensor:
        attended = self._selection.attend(layer, queries)
        if self._measured:
            self._seen.append((queries.own, self._new_rows(layer), attended, self._selection.latest))
        return attended

    def finish(self) -> None:
        if not self._measured:
            return
        query, newest, output, selected = (torch.stack(tensors) for tensors in zip(*self._seen, strict=True))
        observations = [
            Observation(
                (sequence := self.group.sequences[row]),
                query[:, row],
                newest[:, row],
                output[:, row],
                torch.cat([_fixed_positions(sequence, selected[:, row]), selected[:, row]], dim=-1),
                selected[:, row],
            )
            for row in self._measured
        ]
        self._parts.probe.measure(observations)

    def _new_rows(self, layer: int) -> Tensor:
        """Return the rows of the new tokens, [B, H_kv, 2d]; those of padding lanes are arbitrary."""
        return self._parts.pool.rows[self.new_slots[:, layer].clamp(min=0).long()]

    def _leaving_keys(self) -> Tensor:
        """Keys of the tokens that leave the window at this step: [B, layers, H_kv, d]; arbitrary where none does."""
        parts = self._parts
        slots = parts.fixed.leaving(self.group.lanes)
        return parts.pool.rows[slots.clamp(min=0).long()][..., : parts.shape.head_dim]


def _fixed_positions(sequence: Sequence, like: Tensor) -> Tensor:
    """Sinks, window and new token for every layer and head: int64 [L, H_kv, F]."""
    return fixed_positions(sequence, sequence.num_tokens + 1, like.device).expand(*like.shape[:2], -1)
