"""The hot cache: the tokens in a sequence's slots where there are fewer slots than tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.resolve import Residency, SeatLanes, resolve
from gpu_worker.kernels.rows import pool_rows
from gpu_worker.policies.base import CacheShape
from gpu_worker.state.block_tables import BlockTables, physical_slots
from gpu_worker.state.lane_inputs import LaneInputs
from gpu_worker.state.seat_memory import seated_state
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool


def residency_tensors(shape: CacheShape, num_slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate the residency of a hot cache, of so many slots a head: see `HotCache`."""
    return (
        shape.seated(shape.max_model_len, dtype=torch.int32),
        shape.seated(num_slots, dtype=torch.int32),
        shape.seated(num_slots, dtype=torch.uint8),
        shape.seated(dtype=torch.int32),
        shape.seated(dtype=torch.int32),
    )


class HotCache:
    """Residency of the seats of sequences that may miss. A token is in at most one slot of a head, a slot holds at most
    one token.

    slot_of: int32 [seats + 1, L, H_kv, N]; token_of: int32 [seats + 1, L, H_kv, S]; -1 where there is none. The clock's
    bits and hands, and how many slots are filled, are as `Residency` says. memory: what is behind a seat's part.
    """

    def __init__(self, shape: CacheShape, pool: SlotPool, block_tables: BlockTables) -> None:
        self._pool = pool
        self._tables = block_tables.tables
        num_slots = self._tables.shape[-1] * BLOCK_SIZE
        (self.slot_of, self.token_of, self.referenced, self.hand, self.filled), self.memory = seated_state(
            pool,
            shape,
            lambda seated: residency_tensors(seated, num_slots),
        )

    def store(self, sequence: Sequence, layer: int, rows: Tensor) -> None:
        """Fill a prefilled layer's slots: sinks first, then as many of the last tokens as fit."""
        seat, num_tokens, num_slots = sequence.seat, rows.shape[1], sequence.num_slots
        self.slot_of[seat, layer, :, : sequence.capacity] = -1
        self.token_of[seat, layer, :, :num_slots] = -1
        self.referenced[seat, layer, :, :num_slots] = 0
        self.hand[seat, layer] = 0
        positions = torch.arange(num_tokens, device=rows.device)
        room = num_slots - 1  # the next token's
        if num_tokens > room:
            num_sink = sequence.plan.num_sink
            positions = torch.cat([positions[:num_sink], positions[num_tokens - (room - num_sink) :]])
        count = positions.shape[0]
        slots = torch.arange(count, device=rows.device)
        self.filled[seat, layer] = count
        self.token_of[seat, layer, :, :count] = positions.int()
        self.slot_of[seat, layer, :, positions] = slots.int()
        physical = physical_slots(self._tables[seat, layer], slots.expand(rows.shape[0], count))
        self._pool.rows[physical] = rows[:, positions]

    def rows_of(self, sequence: Sequence, layer: int, positions: Tensor) -> Tensor:
        """Pool rows of resident positions int64 [T] of a prefilled layer, in every head: int64 [H_kv, T]."""
        slots = self.slot_of[sequence.seat, layer][:, positions].long()
        return physical_slots(self._tables[sequence.seat, layer], slots)

    def holds(self, sequence: Sequence, layer: int, begin: int, end: int) -> Tensor:
        """Which of the positions [begin, end) are resident: bool [H_kv, end - begin]."""
        return self.slot_of[sequence.seat, layer, :, begin:end] >= 0

    def place(self, rows: LaneInputs) -> Tensor:
        """Give the new tokens slots in every layer and head: their pool rows, int32 [B, L, H_kv]."""
        # Layers count as heads, so that one launch serves them all.
        residency = Residency(*(state.flatten(1, 2) for state in self._states()))
        positions = rows.positions[:, None, None].expand(-1, residency.hand.shape[1], 1)
        slots, _ = resolve(residency, _seat_rows(rows), positions)
        placed = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
        pool_rows(self._tables.flatten(1, 2), rows.seats, slots, placed)
        return placed.view(positions.shape[0], *self._tables.shape[1:3])

    def resolve(self, rows: LaneInputs, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Give selected positions int64 [B, H_kv, K] slots: these, and which of them must be fetched."""
        residency = Residency(*(state[:, layer] for state in self._states()))
        return resolve(residency, _seat_rows(rows), positions)

    def take_over(self, sequence: Sequence) -> None:
        """Take over a sequence that was fully resident: slot i holds position i."""
        seat, num_tokens = sequence.seat, sequence.num_tokens
        every = torch.arange(num_tokens, dtype=torch.int32, device=self.hand.device)
        self.slot_of[seat, :, :, : sequence.capacity] = -1
        self.slot_of[seat, :, :, :num_tokens] = every
        self.token_of[seat, :, :, :num_tokens] = every
        self.referenced[seat, :, :, : sequence.num_slots] = 0
        self.hand[seat] = 0
        self.filled[seat] = num_tokens

    def grow(self, sequence: Sequence, num_slots: int) -> None:
        """Use so many slots from the next step on; the new ones are empty."""
        self.token_of[sequence.seat, :, :, sequence.num_slots : num_slots] = -1
        self.referenced[sequence.seat, :, :, sequence.num_slots : num_slots] = 0

    def shrink(self, sequence: Sequence, num_slots: int) -> None:
        """Use only the first `num_slots` of the sequence's slots from the next step on, but no fewer than its sinks,
        its window and the new token need.

        Sinks and window move there, in place of tokens that were not used lately; other tokens beyond are dropped,
        and fetched again when they are selected.
        """
        for layer in range(self.hand.shape[1]):
            self._shrink_layer(sequence, layer, num_slots)

    def _shrink_layer(self, sequence: Sequence, layer: int, num_slots: int) -> None:
        seat, tables = sequence.seat, self._tables[sequence.seat, layer]
        slot_of, token_of, referenced, hand, filled = (state[seat, layer] for state in self._states())
        slots = torch.arange(sequence.num_slots, device=hand.device)
        token = token_of[:, : sequence.num_slots].long()
        is_held = slots < filled[:, None]
        is_fixed = is_held & ((token < sequence.plan.num_sink) | (token >= sequence.window_begin))
        moves, goes = is_fixed & (slots >= num_slots), is_held & ~is_fixed & (slots >= num_slots)
        # Where something moves, no slot is free: the places are those of tokens, the clock's clear bits first.
        places = (referenced[:, :num_slots] + 2 * is_fixed[:, :num_slots]).argsort(dim=1, stable=True)
        head, source = moves.nonzero(as_tuple=True)
        target = places[head, (moves.cumsum(dim=1) - 1)[head, source]]

        slot_of[head, token[head, target]] = -1
        slot_of[head, token[head, source]] = target.int()
        token_of[head, target] = token[head, source].int()
        referenced[head, target] = referenced[head, source]
        self._pool.rows[_row(tables, head, target)] = self._pool.rows[_row(tables, head, source)]
        head, source = goes.nonzero(as_tuple=True)
        slot_of[head, token[head, source]] = -1
        filled.clamp_(max=num_slots)
        hand.remainder_(num_slots)

    def _states(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.slot_of, self.token_of, self.referenced, self.hand, self.filled


def _seat_rows(rows: LaneInputs) -> SeatLanes:
    return SeatLanes(rows.seats, rows.capacities, rows.begin, rows.end)


def _row(tables: Tensor, heads: Tensor, slots: Tensor) -> Tensor:
    """Pool rows of slots int64 [n] of these heads. tables: int64 [H_kv, max_blocks]."""
    return tables[heads, slots // BLOCK_SIZE] * BLOCK_SIZE + slots % BLOCK_SIZE
