"""The hot cache: which tokens lie in a sequence's slots, layer by layer and head by head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.slot_pool import BlockTables, SlotPool, physical_slots
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.resolve import Misses, Residency, SeatRows, claim
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
        self._all_layers = Residency(
            self._slot_of.flatten(0, 1),
            self._token_of.flatten(0, 1),
            self._referenced.flatten(0, 1),
            self._hand.flatten(0, 1),
        )

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

    def place(self, sequences: list[Sequence], positions: Tensor, layers: range) -> None:
        """Give the next token of each sequence, at `positions` int64 [B], a slot in every layer and head."""
        num_layers, num_kv_heads = self._slot_of.shape[1:3]
        # A row for each (sequence, layer): the seats of a state whose layers are seats too.
        seats = [sequence.seat * num_layers + layer for sequence in sequences for layer in layers]
        rows = self._seat_rows([sequence for sequence in sequences for _ in layers], seats)
        required = positions.repeat_interleave(len(layers))[:, None, None].expand(-1, num_kv_heads, 1)
        places = torch.arange(len(seats) * num_kv_heads, device=positions.device)
        row, head = places // num_kv_heads, places % num_kv_heads
        # A new token is nowhere yet, so nothing needs to be looked up.
        misses = Misses(row, head, torch.zeros_like(row), most=1)
        slots, missed = torch.full_like(required, -1), torch.ones_like(required, dtype=torch.bool)
        claim(self._all_layers, rows, required, slots, missed, misses)

    def at(self, layer: int) -> Residency:
        """The state of one layer."""
        return Residency(
            self._slot_of[:, layer],
            self._token_of[:, layer],
            self._referenced[:, layer],
            self._hand[:, layer],
        )

    def seat_rows(self, sequences: list[Sequence]) -> SeatRows:
        """How these sequences resolve positions in any one layer during this step."""
        return self._seat_rows(sequences, [sequence.seat for sequence in sequences])

    def _seat_rows(self, sequences: list[Sequence], seats: list[int]) -> SeatRows:
        return SeatRows.of(
            seats,
            [sequence.num_slots for sequence in sequences],
            [sequence.plan.num_sink for sequence in sequences],
            [sequence.window_begin for sequence in sequences],
            self._slot_of.device,
        )

    def pool_rows(self, seats: Tensor, layer: int, slots: Tensor) -> Tensor:
        """Pool rows of slots int64 [B, H_kv, A]; -1 stays -1."""
        heads = torch.arange(slots.shape[1], device=slots.device)
        blocks = self._tables[seats[:, None, None], layer, heads[:, None], slots.clamp(min=0) // BLOCK_SIZE]
        return (blocks * BLOCK_SIZE + slots % BLOCK_SIZE).where(slots >= 0, -1)

    def slots_of(self, seats: Tensor, layer: int, positions: Tensor) -> Tensor:
        """Pool rows that hold these positions, which must be resident. positions: int64 [B, H_kv, A], -1 stays -1."""
        heads = torch.arange(positions.shape[1], device=positions.device)
        slots = self._slot_of[seats[:, None, None], layer, heads[:, None], positions.clamp(min=0)]
        return self.pool_rows(seats, layer, slots.long().where(positions >= 0, -1))

    def slots_in(self, seats: Tensor, layers: range, positions: Tensor) -> Tensor:
        """As `slots_of`, of the same positions int64 [B, A] in many layers and all heads: [B, layers, H_kv, A]."""
        span = slice(layers.start, layers.stop)
        every = positions[:, None, None].expand(-1, len(layers), self._slot_of.shape[2], -1)
        slots = self._slot_of[seats, span].gather(-1, every.clamp(min=0)).long()
        return physical_slots(self._tables[seats, span], slots.masked_fill(every < 0, -1))

    def keys(self, seat: int, layers: range, begin: int, end: int) -> Tensor:
        """Keys of resident positions [begin, end): [len(layers), H_kv, T, d]."""
        span = slice(layers.start, layers.stop)
        slots = self._slot_of[seat, span, :, begin:end].long()
        rows = self._pool.rows[physical_slots(self._tables[seat, span], slots)]
        return rows[..., : rows.shape[-1] // 2]
