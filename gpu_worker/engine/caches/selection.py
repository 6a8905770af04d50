"""Which tokens a decode step attends beside sinks and window: the scores of each policy, and the best of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gpu_worker.engine.caches.base import Group
from gpu_worker.engine.caches.hot_cache import HotCache
from gpu_worker.engine.caches.index_book import IndexBook
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.slot_pool import SlotPool
from gpu_worker.kernels.top_k import top_k
from gpu_worker.policies.base import CacheShape, Candidates, RecallPolicy


def recall_policy(sequence: Sequence) -> RecallPolicy:
    """The policy of a sequence that the recall cache serves; CacheSet gives it no other."""
    return cast(RecallPolicy, sequence.policy)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What one policy chooses from in every layer of a step. rows: its part of the group, None for all of it; seats,
    begin, end, counts: int64 [B]; max_end, max_count: the largest. resident: of a policy that `reads_keys`, every
    token's position, int64 [B, 1, M], -1 pads, and their numbers [B]."""

    policy: RecallPolicy
    rows: Tensor | None
    seats: Tensor
    begin: Tensor
    end: Tensor
    counts: Tensor
    max_end: int
    max_count: int
    resident: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, group: Group, places: list[int]) -> _Choice:
        sequences = [group.sequences[place] for place in places]
        policy, device = recall_policy(sequences[0]), group.seats.device
        begins = [sequence.plan.num_sink for sequence in sequences]
        ends = [sequence.window_begin for sequence in sequences]
        counts = [sequence.plan.num_selected or 0 for sequence in sequences]
        at, begin, end, count = torch.tensor([places, begins, ends, counts], device=device).unbind(0)
        is_all = len(places) == len(group.sequences)
        seats, newest = (group.seats, group.positions) if is_all else (group.seats[at], group.positions[at])
        resident = None
        if policy.reads_keys:
            longest = max(sequence.num_tokens for sequence in sequences) + 1
            positions = torch.arange(longest, device=device)
            resident = positions.where(positions <= newest[:, None], -1)[:, None], newest + 1
        return cls(policy, None if is_all else at, seats, begin, end, count, max(ends), max(counts), resident)


class Selection:
    """The choices of one decode step of one group."""

    def __init__(
        self, shape: CacheShape, indexes: IndexBook, hot_cache: HotCache, pool: SlotPool, group: Group
    ) -> None:
        self._shape = shape
        self._indexes = indexes
        self._hot_cache = hot_cache
        self._pool = pool
        self._num_sequences = len(group.sequences)
        by_policy: dict[str, list[int]] = {}
        for place, sequence in enumerate(group.sequences):
            if sequence.plan.selects:
                by_policy.setdefault(sequence.policy.name, []).append(place)
        self._choices = [_Choice.of(group, places) for places in by_policy.values()]
        # K, the most that a sequence selects.
        self.width = max((choice.max_count for choice in self._choices), default=0)

    def select(self, layer: int, query: Tensor) -> Tensor:
        """Selected positions, ascending, -1 pads at the end: query [B, H_q, d] to int64 [B, H_kv, K]."""
        selected = None
        for choice in self._choices:
            chosen = self._choose(choice, layer, query)
            if choice.rows is None:
                return chosen
            if selected is None:
                selected = chosen.new_full((self._num_sequences, chosen.shape[1], self.width), -1)
            selected[choice.rows, :, : choice.max_count] = chosen
        assert selected is not None, "nothing selects"
        return selected

    def _choose(self, choice: _Choice, layer: int, query: Tensor) -> Tensor:
        query = query if choice.rows is None else query[choice.rows]
        keys = num_tokens = None
        if choice.resident is not None:
            positions, num_tokens = choice.resident
            every = positions.expand(-1, self._shape.num_kv_heads, -1)
            slots = self._hot_cache.slots_of(choice.seats, layer, every)
            keys = self._pool.rows[slots.clamp(min=0)][..., : query.shape[-1]]
        candidates = Candidates(
            layer,
            query,
            choice.seats,
            choice.begin,
            choice.end,
            choice.max_end,
            self._shape.scale,
            keys,
            num_tokens,
        )
        scores = self._indexes.score(choice.policy, candidates)
        return top_k(scores, choice.counts, choice.max_count)
