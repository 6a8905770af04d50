"""The hot cache: which tokens lie in a sequence's slots, layer by layer and head by head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.slot_pool import BlockTables, SlotPool, physical_slots
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.resolve import Residency, resolve
from gpu_worker.policies.base import CacheShape


@dataclass(frozen=True, slots=True)
class HotCacheSize:
    """C, the slots of a recall sequence beside sinks and window: a share of the prompt, a number, or (neither) auto.

    Auto is the whole context where that is at most half of what is free, else that half: the next request finds room.
    Where sinks and window leave less than that half, it is what they leave.
    """

    share: float | None = None
    tokens: int | None = None

    def num_slots(
        self, num_prompt_tokens: int, capacity: int, num_fixed_slots: int, num_free_slots: int
    ) -> int:
        """C in slots for each layer and head. capacity: tokens that the sequence may ever hold.

        num_fixed_slots: for sinks, window and the new token. num_free_slots: for all of them and C.
        """
        if self.tokens is not None:
            return self.tokens
        if self.share is not None:
            return math.ceil(self.share * num_prompt_tokens)
        return min(capacity, num_free_slots // 2, max(0, num_free_slots - num_fixed_slots))


class HotCache:
    """Residency of every seat. A token is in at most one slot of a head, a slot holds at most one token.

    slot_of: int32 [seats, L, H_kv, N]; token_of: int32 [seats, L, H_kv, S]; -1 where there is none.
    """

    def __init__(self, shape: CacheShape, pool: SlotPool, block_tables: BlockTables) -> None:
        self._pool = pool
        self._tables = block_tables.tables
        num_slots = self._tables.shape[-1] * BLOCK_SIZE
        self._slot_of = shape.seated(shape.max_model_len, dtype=torch.int32)
        self._token_of = shape.seated(num_slots, dtype=torch.int32)
        self._referenced = shape.seated(num_slots, dtype=torch.bool)
        self._hand = shape.seated(dtype=torch.int64)

    def store(self, sequence: Sequence, layer: int, rows: Tensor) -> None:
        """Fill a prefilled layer's slots: sinks first, then as many of the last tokens as there is room for."""
        seat, num_tokens, num_slots = sequence.seat, rows.shape[1], sequence.num_slots
        self._slot_of[seat, layer, :, : sequence.capacity] = -1
        self._token_of[seat, layer, :, :num_slots] = -1
        self._referenced[seat, layer, :, :num_slots] = False
        self._hand[seat, layer] = 0
        positions = torch.arange(num_tokens, device=rows.device)
        room = num_slots - 1  # the next token's
        if num_tokens > room:
            num_sink = sequence.plan.num_sink
            positions = torch.cat([positions[:num_sink], positions[num_tokens - (room - num_sink) :]])
        count = positions.shape[0]
        slots = torch.arange(count, device=rows.device)
        self._token_of[seat, layer, :, :count] = positions.int()
        self._slot_of[seat, layer, :, positions] = slots.int()
        physical = physical_slots(self._tables[seat, layer], slots.expand(rows.shape[0], count))
        self._pool.rows[physical] = rows[:, positions]

    def place(self, sequence: Sequence, layers: range, window_begin: int) -> None:
        """Give the next token a slot in every layer and head."""
        position = sequence.num_tokens
        for layer in layers:
            num_kv_heads = self._slot_of.shape[2]
            required = torch.full((1, num_kv_heads, 1), position, device=self._slot_of.device)
            self.resolve([sequence], layer, required, [window_begin])

    def resolve(
        self, sequences: list[Sequence], layer: int, required: Tensor, window_begins: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Slots of the required positions and which of them must be fetched; both [B, H_kv, R]."""
        residency = Residency(
            self._slot_of[:, layer],
            self._token_of[:, layer],
            self._referenced[:, layer],
            self._hand[:, layer],
        )
        return resolve(
            residency,
            [sequence.seat for sequence in sequences],
            [sequence.num_slots for sequence in sequences],
            required,
            [sequence.plan.num_sink for sequence in sequences],
            window_begins,
        )

    def slots_of(self, seats: Tensor, layer: int, positions: Tensor) -> Tensor:
        """Pool rows that hold these positions, which must be resident. positions: int64 [B, H_kv, A], -1 stays -1."""
        slots = self._slot_of[seats, layer].gather(-1, positions.clamp(min=0)).long()
        return physical_slots(self._tables[seats, layer], slots.masked_fill(positions < 0, -1))

    def keys(self, seat: int, layers: range, begin: int, end: int) -> Tensor:
        """Keys of resident positions [begin, end): [len(layers), H_kv, T, d]."""
        span = slice(layers.start, layers.stop)
        slots = self._slot_of[seat, span, :, begin:end].long()
        rows = self._pool.rows[physical_slots(self._tables[seat, span], slots)]
        return rows[..., : rows.shape[-1] // 2]
