"""One decode step of sequences with compressed layers: a slot for the new token, attention over what is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.caches.base import GroupStep
from gpu_worker.caches.probe import Observation
from gpu_worker.caches.retain.kept_attention import KeptAttention, RetainParts
from gpu_worker.policies.base import StepQueries
from gpu_worker.policies.retain import Gift, RetainPolicy
from gpu_worker.state.batch import Group


class RetainStep(GroupStep):
    """The sequences of a group share a policy."""

    def __init__(self, group: Group, policy: RetainPolicy, parts: RetainParts) -> None:
        self.group = group
        self._parts = parts
        slots = self._slots(policy)
        self.new_slots = self._pool_rows(slots[..., None])[..., 0]
        lengths = parts.kept.take_in(group.lanes, slots)
        self._attention = policy.attention(KeptAttention(group, lengths, parts))
        self._measured = [
            row for row, one in enumerate(group.sequences) if one.request.measure and not one.plan.has_means
        ]
        # Query, new rows and output of each layer, for the probe.
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, layer: int, queries: StepQueries) -> Tensor:
        attended = self._attention.attend(layer, queries)
        if self._measured:
            newest = self._parts.pool.rows[self.new_slots[:, layer].long()]
            self._seen.append((queries.own, newest, attended))
        return attended

    def finish(self) -> None:
        if not self._measured:
            return
        query, newest, output = (torch.stack(tensors) for tensors in zip(*self._seen, strict=True))
        observations = []
        for row in self._measured:
            sequence = self.group.sequences[row]
            positions = self._parts.kept.positions[sequence.seat]
            is_middle = (positions >= sequence.plan.num_sink) & (positions < sequence.window_begin)
            selected = positions.where(is_middle, -1)
            observations.append(
                Observation(sequence, query[:, row], newest[:, row], output[:, row], positions, selected)
            )
        self._parts.probe.measure(observations)

    def _slots(self, policy: RetainPolicy) -> Tensor:
        """Where the new tokens go: int64 [B, L, H_kv]."""
        rows, kept = self.group.lanes, self._parts.kept
        appended = kept.appended(rows)
        if not policy.evicts:
            return appended
        is_full = kept.is_full(rows) & (rows.positions >= 0)[:, None, None]
        evicted = policy.evict(kept.before_step(rows, self.group.shape.num_positions))
        if evicted.gift is not None:
            self._give(evicted.slots, evicted.gift, is_full)
        return torch.where(is_full, evicted.slots, appended)

    def _give(self, evicted: Tensor, gift: Gift, is_full: Tensor) -> None:
        """Add evicted values to those that the policy names, before they are overwritten."""
        pool, head_dim = self._parts.pool.rows, self._parts.shape.head_dim
        # A head that evicts nothing may name a slot that it has not.
        source = self._pool_rows(evicted.where(is_full, -1)[..., None])[..., 0].clamp(min=0).long()
        targets = self._pool_rows(gift.slots)
        share = gift.share.where(is_full, 0.0)[..., None] * (targets >= 0)
        given = pool[source][..., None, head_dim:].float() * share[..., None]
        # Where nothing is given nothing is added, whatever lies in the slot.
        given = given.where(share[..., None] > 0, 0.0).to(pool.dtype)
        pool[:, head_dim:].index_add_(0, targets.clamp(min=0).long().flatten(), given.flatten(0, -2))

    def _pool_rows(self, slots: Tensor) -> Tensor:
        return self._parts.pool_rows(self.group.lanes, slots)
