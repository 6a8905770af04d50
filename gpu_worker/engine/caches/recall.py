"""Selected tokens through the hot cache: sinks and window stay, misses come from the arena."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from gpu_worker.engine.caches.base import Cache, Group
from gpu_worker.engine.caches.hot_cache import HotCache, HotCacheSize
from gpu_worker.engine.caches.index_book import IndexBook
from gpu_worker.engine.offload import Offloader, TrainedLayer
from gpu_worker.engine.probe import Probe
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.slot_pool import BlockTables, SlotPool, physical_slots
from gpu_worker.errors import StoreUnavailable
from gpu_worker.kernels.attention import attend_slots
from gpu_worker.kernels.top_k import top_k
from gpu_worker.policies.base import CacheShape, Candidates, RecallPolicy

# Longest wait for the store to train an index; far above any real one, it only bounds a hang.
INDEX_TIMEOUT_SECONDS = 600.0
# Between two looks at whether the store is still there.
INDEX_WAIT_SECONDS = 0.5


def recall_policy(sequence: Sequence) -> RecallPolicy:
    """The policy of a sequence that this cache serves; CacheSet gives it no other."""
    return cast(RecallPolicy, sequence.policy)


class RecallCache(Cache):
    """One cache for every recall policy and any mix of them; a policy is asked for scores only."""

    is_indexed = True

    def __init__(
        self,
        shape: CacheShape,
        pool: SlotPool,
        block_tables: BlockTables,
        offloader: Offloader,
        hot_cache_size: HotCacheSize,
    ) -> None:
        self._scale = shape.scale
        self._num_kv_heads = shape.num_kv_heads
        self._pool = pool
        self._block_tables = block_tables
        self._offloader = offloader
        self._hot_cache_size = hot_cache_size
        self._hot_cache = HotCache(shape, pool, block_tables)
        self._indexes = IndexBook(shape)
        self._probe = Probe(offloader, shape.scale)

    def num_slots(self, sequence: Sequence, num_free_slots: int) -> int:
        plan, policy = sequence.plan, recall_policy(sequence)
        if not plan.selects or policy.reads_keys:
            return sequence.capacity
        fixed = plan.num_sink + policy.max_window(plan) + 1
        needed = fixed + (plan.num_selected or 0)
        wanted = fixed + self._hot_cache_size.num_slots(
            plan.num_prompt_tokens, sequence.capacity, fixed, num_free_slots
        )
        return min(sequence.capacity, max(needed, wanted))

    def admit(self, sequence: Sequence, layer: int) -> None:
        self._block_tables.assign(sequence.seat, layer, sequence.num_slots)

    def store(self, sequence: Sequence, layer: int, rows: Tensor) -> None:
        self._hot_cache.store(sequence, layer, rows)

    def load(self, sequence: Sequence, trained: TrainedLayer, timeout_seconds: float) -> bool:
        """Take a trained index over if it is ready within the time. Raises StoreUnavailable when none will come."""
        segment = self._offloader.segment(trained, timeout_seconds)
        if segment is None:
            return False
        self._indexes.load(recall_policy(sequence), sequence.seat, trained.layer, trained.job, segment)
        return True

    def advance(self, sequence: Sequence, layers: range) -> None:
        policy, begin = recall_policy(sequence), sequence.window_begin
        end = policy.window_begin(sequence.plan, sequence.num_tokens)
        if end > begin and sequence.plan.selects:
            if policy.trains_when_leaving:
                self._train(sequence, layers, begin, end)
            else:
                keys = self._hot_cache.keys(sequence.seat, layers, begin, end)
                self._indexes.extend(policy, sequence.seat, layers, begin, keys)
        sequence.window_begin = end
        self._hot_cache.place(sequence, layers, end)

    def _train(self, sequence: Sequence, layers: range, begin: int, end: int) -> None:
        job = recall_policy(sequence).index_job(sequence.plan, begin, end)
        if job is None:
            return
        self._offloader.seal(sequence, end)
        trained = [self._offloader.build(sequence, layer, job) for layer in layers]
        deadline = time.monotonic() + INDEX_TIMEOUT_SECONDS
        for index in trained:
            while not self.load(sequence, index, INDEX_WAIT_SECONDS):
                if time.monotonic() > deadline:
                    raise StoreUnavailable(f"no index within {INDEX_TIMEOUT_SECONDS:.0f} s")

    def append(self, layer: int, group: Group, rows: Tensor) -> None:
        positions = group.positions[:, None, None].expand(-1, rows.shape[1], 1)
        self._pool.rows[self._hot_cache.slots_of(group.seats, layer, positions)[..., 0]] = rows

    def attend(self, layer: int, group: Group, query: Tensor) -> Tensor:
        selected = self._select(layer, group, query)
        self._make_resident(layer, group, selected)
        positions = self._attended(group, selected)
        slots = self._hot_cache.slots_of(group.seats, layer, positions)
        for row, sequence in enumerate(group.sequences):
            if sequence.request.measure:
                self._probe.measure(
                    sequence,
                    layer,
                    query[row],
                    self._pool.rows[slots[row, :, -1]],
                    positions[row],
                    selected[row],
                )
        return attend_slots(query, self._pool.rows, slots, self._scale)

    def release(self, sequence: Sequence, layer: int) -> None:
        self._block_tables.release(sequence.seat, layer)

    def _select(self, layer: int, group: Group, query: Tensor) -> list[Tensor]:
        """Each sequence's selected positions, ascending: int64 [H_kv, k]."""
        selected: list[Tensor] = [query.new_empty(0)] * len(group.sequences)
        by_policy: dict[str, list[int]] = {}
        for row, sequence in enumerate(group.sequences):
            if sequence.plan.selects:
                by_policy.setdefault(sequence.policy.name, []).append(row)
            else:
                middle = torch.arange(sequence.plan.num_sink, sequence.window_begin, device=query.device)
                selected[row] = middle.expand(self._num_kv_heads, -1)
        for rows in by_policy.values():
            sequences = [group.sequences[row] for row in rows]
            candidates = self._candidates(layer, sequences, group, rows, query)
            scores = self._indexes.score(recall_policy(sequences[0]), candidates)
            counts = [sequence.plan.num_selected or 0 for sequence in sequences]
            chosen = top_k(scores, torch.tensor(counts, device=query.device))
            for row, positions, count in zip(rows, chosen, counts, strict=True):
                selected[row] = positions[:, :count]
        return selected

    def _candidates(
        self, layer: int, sequences: list[Sequence], group: Group, rows: list[int], query: Tensor
    ) -> Candidates:
        ends = [sequence.window_begin for sequence in sequences]
        device = query.device
        seats = group.seats[rows]
        begin = torch.tensor([sequence.plan.num_sink for sequence in sequences], device=device)
        candidates = Candidates(
            layer, query[rows], seats, begin, torch.tensor(ends, device=device), max(ends), self._scale
        )
        if not recall_policy(sequences[0]).reads_keys:
            return candidates
        num_tokens = group.positions[rows] + 1
        positions = torch.arange(int(num_tokens.max()), device=device)
        positions = positions.where(positions < num_tokens[:, None], -1)[:, None]
        resident = self._hot_cache.slots_of(seats, layer, positions.expand(-1, self._num_kv_heads, -1))
        keys = self._pool.rows[resident.clamp(min=0)][..., : query.shape[-1]]
        return replace(candidates, keys=keys, num_tokens=num_tokens)

    def _make_resident(self, layer: int, group: Group, selected: list[Tensor]) -> None:
        """Slots for what was selected, and the missing rows fetched into theirs."""
        sequences = group.sequences
        required = pad_sequence([positions.T for positions in selected], batch_first=True, padding_value=-1)
        required = required.transpose(1, 2)
        slots, missed = self._hot_cache.resolve(
            sequences, layer, required, [sequence.window_begin for sequence in sequences]
        )
        num_missed = missed.sum(dim=(1, 2)).tolist()
        for row, sequence in enumerate(sequences):
            if sequence.plan.selects:
                sequence.meter.selected_rows += selected[row].numel()
                sequence.meter.hit_rows += selected[row].numel() - num_missed[row]
        if not any(num_missed):
            return
        wanted = [
            (sequence, head, required[row, head, missed[row, head]])
            for row, sequence in enumerate(sequences)
            if num_missed[row]
            for head in range(self._num_kv_heads)
        ]
        tables = self._block_tables.tables[group.seats, layer]
        self._pool.rows[physical_slots(tables, slots)[missed]] = self._offloader.fetch(layer, wanted)

    def _attended(self, group: Group, selected: list[Tensor]) -> Tensor:
        """Sinks, selected, window and the new token: positions [B, H_kv, A], -1 pads in front."""
        attended = []
        for sequence, middle in zip(group.sequences, selected, strict=True):
            plan, meter = sequence.plan, sequence.meter
            sinks = torch.arange(plan.num_sink, device=middle.device).expand(self._num_kv_heads, -1)
            window = torch.arange(sequence.window_begin, sequence.num_tokens + 1, device=middle.device)
            attended.append(torch.cat([sinks, middle, window.expand(self._num_kv_heads, -1)], dim=1))
            num_window = sequence.num_tokens - sequence.window_begin
            num_taken = float((middle >= 0).sum()) / self._num_kv_heads
            meter.num_layer_steps += 1
            meter.attended_tokens += plan.num_sink + num_taken + (0 if plan.window_extra else num_window)
            meter.window_tokens += num_window if plan.window_extra else 0
        width = max(positions.shape[1] for positions in attended)
        return torch.stack(
            [pad(positions, (width - positions.shape[1], 0), value=-1) for positions in attended]
        )
