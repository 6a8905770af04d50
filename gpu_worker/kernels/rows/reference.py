"""The definition of moving rows, in PyTorch.

The arena is a flat uint8 tensor; a row of it is found by the offset of its first byte, int64. All offsets are multiples
of 16, or of the largest power of two that divides the row's bytes if that is less. A row whose offset is below 0 or
that would end beyond the arena is skipped. A pool can stand for the arena: there, the offset is slot * row bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.row_format import row_format, row_word
from kv_store.client import RowFormat


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """How rows lie in the arena: slabs of `slab_bytes`, each `[kv_head][token][K|V]`.

    tokens_per_slab: a power of two.
    """

    slab_bytes: int
    tokens_per_slab: int
    row_format: RowFormat


def offsets_by_table(
    slab_table: Tensor, seats: Tensor, positions: Tensor, layout: ArenaLayout, num_slabs: int
) -> Tensor:
    """Where the rows of these positions begin: int64 [B, H_kv, R]; -1 where there is none.

    slab_table: int32 [seats, I], slabs of one layer of every seat, -1 for none. seats: int64 [B]. positions: int64
    [B, H_kv, R], -1 pads. A slab that the arena of `num_slabs` slabs does not have, and a position beyond the table,
    give -1 too.
    """
    index = positions // layout.tokens_per_slab
    exists = (positions >= 0) & (index < slab_table.shape[1])
    slab = slab_table[seats[:, None, None], index.where(exists, 0)].long()
    exists &= (slab >= 0) & (slab < num_slabs)
    heads = torch.arange(positions.shape[1], device=positions.device)[:, None]
    token = heads * layout.tokens_per_slab + positions % layout.tokens_per_slab
    return (slab * layout.slab_bytes + token * layout.row_format.row_bytes).where(exists, -1)


def gather_rows(arena: Tensor, offsets: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Copy rows of the arena into slots of the pool.

    arena: uint8 [bytes]. offsets: int64, slots: int64 or int32, of one shape; a slot below 0 is skipped. pool:
    [num_slots, 2d], contiguous, of any type; written in place. No slot may be written twice.
    """
    wanted = _in_arena(arena, offsets, pool.shape[1] * pool.itemsize) & (slots >= 0)
    rows = _rows(arena, pool.shape[1], pool.dtype).index_select(0, offsets[wanted] // pool.itemsize)
    pool.index_copy_(0, slots[wanted].long(), rows)


def scatter_rows(arena: Tensor, offsets: Tensor, pool: Tensor, slots: Tensor) -> None:
    """The other way: copy slots of the pool to rows of the arena. Arguments as of `gather_rows`."""
    wanted = _in_arena(arena, offsets, pool.shape[1] * pool.itemsize) & (slots >= 0)
    rows = pool.index_select(0, slots[wanted].long())
    _rows(arena, pool.shape[1], pool.dtype).index_copy_(0, offsets[wanted] // pool.itemsize, rows)


def gather_pairs(arena: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
    """Copy rows of the arena into keys and values; of a row that is skipped, theirs stay.

    arena: uint8 [bytes]. offsets: int64 [N, M]. keys, values: [N, M, d] of one type, contiguous in d only; written in
    place.
    """
    row = row_format(keys.shape[2], keys.dtype)
    wanted = _in_arena(arena, offsets, row.row_bytes)
    rows = _rows(arena, row.row_elements, keys.dtype).index_select(0, offsets[wanted] // keys.itemsize)
    keys[wanted], values[wanted] = rows.split(row.head_dim, dim=-1)


def scatter_pairs(arena: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
    """The other way: write keys and values as rows K|V of the arena. Arguments as of `gather_pairs`."""
    row = row_format(keys.shape[2], keys.dtype)
    wanted = _in_arena(arena, offsets, row.row_bytes)
    rows = torch.cat([keys[wanted], values[wanted]], dim=-1)
    _rows(arena, row.row_elements, keys.dtype).index_copy_(0, offsets[wanted] // keys.itemsize, rows)


def store_token(
    keys: Tensor,
    values: Tensor,
    pool: Tensor,
    slots: Tensor,
    arena: Tensor | None = None,
    offsets: Tensor | None = None,
) -> None:
    """Write the new rows of a decode step into the pool, and into the arena where there is one.

    keys, values: [B, H_kv, d] of the pool's type, contiguous in d only. pool: [num_slots, 2d], contiguous; written in
    place. slots: int32 or int64 [B, H_kv], pool rows. arena: uint8 [bytes] or None; offsets: int64 [B, H_kv]. Either
    write is skipped where its slot or offset is below 0, the other is not. No row may be written twice.
    """
    wanted = slots >= 0
    pool[slots[wanted].long()] = torch.cat([keys[wanted], values[wanted]], dim=-1)
    if arena is not None and offsets is not None:
        scatter_pairs(arena, offsets, keys, values)


def store_prompt(rows: Tensor, pool: Tensor, block_tables: Tensor, seat: int, layer: int) -> None:
    """Put all rows of some prefilled layers, from `layer` on, into a seat's slots: logical slot i holds token i.

    rows: [layers, H_kv, n, 2d] of the pool's type, contiguous in 2d only. pool: [num_slots, 2d], contiguous; written in
    place. block_tables: int64 [seats, L, H_kv, blocks], contiguous in all but the first.
    """
    num_layers, _, num_tokens, row = rows.shape
    blocks = block_tables[seat, layer : layer + num_layers, :, : -(-num_tokens // BLOCK_SIZE)]
    slots = (blocks[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=rows.device)).flatten(2)
    word = row_word(row * rows.itemsize)
    pool.view(word)[slots[..., :num_tokens]] = rows.view(word)


def load_prompt(rows: Tensor, pool: Tensor, blocks: Tensor) -> None:
    """The other way, of one layer: fill rows with what slots hold, token i with logical slot i.

    rows: [H_kv, n, 2d] of the pool's type, contiguous in 2d only; written in place. pool: [num_slots, 2d], contiguous.
    blocks: int64 [H_kv, >= those of n slots], contiguous: where the slots of a head lie.
    """
    num_tokens, row = rows.shape[1:]
    slots = (blocks[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=rows.device)).flatten(1)
    word = row_word(row * rows.itemsize)
    rows.view(word).copy_(pool.view(word)[slots[:, :num_tokens]])


def keep_rows(
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    held: Tensor,
    lengths: Tensor,
    limits: Tensor,
    seat: int,
    layer: int,
    room: int,
) -> None:
    """Start a seat's slots in some layers, from `layer` on, with rows that are kept; all other slots are empty.

    positions: int64 [layers * H_kv, S], of the rows of each head, the first layer's heads first, -1 for none. keys,
    values: [layers * H_kv, S, d] of the pool's type, contiguous in d only. pool: [num_slots, 2d], contiguous, and
    block_tables: int64 [seats, L, H_kv, blocks]: where the S slots of a head lie. held: int64 [seats, L, H_kv, W >= S],
    the position in each slot, -1 for none. lengths, limits: int32 [seats, L, H_kv], how many slots are filled, and how
    many may be: `room` more. The pool is contiguous, the tables are in all but the first
    dimension; pool, held, lengths and limits are written in
    place.
    """
    num_heads, num_kept = block_tables.shape[2], positions.shape[1]
    place = seat, slice(layer, layer + len(positions) // num_heads)
    is_kept = positions >= 0
    counts = is_kept.sum(dim=1).int().unflatten(0, (-1, num_heads))
    lengths[place], limits[place] = counts, counts + room
    held[place][..., :num_kept] = positions.unflatten(0, (-1, num_heads))
    held[place][..., num_kept:] = -1
    slots = torch.arange(num_kept, device=positions.device).expand_as(positions)
    blocks = block_tables[place].flatten(0, 1).gather(1, slots // BLOCK_SIZE)
    rows = blocks * BLOCK_SIZE + slots % BLOCK_SIZE
    pool[rows[is_kept]] = torch.cat([keys[is_kept], values[is_kept]], dim=-1)


def pool_rows(block_tables: Tensor, seats: Tensor, slots: Tensor, out: Tensor) -> None:
    """Write where logical slots lie in the pool to `out`, int32 [B, H, R], contiguous in R only.

    block_tables: int64 [seats, H, blocks]. seats: int64 [B]. slots: int64 [B, H, R], -1 stays -1.
    """
    heads = torch.arange(slots.shape[1], device=slots.device)[:, None]
    blocks = block_tables[seats[:, None, None], heads, slots.clamp(min=0) // BLOCK_SIZE]
    out.copy_((blocks * BLOCK_SIZE + slots % BLOCK_SIZE).where(slots >= 0, -1))


def fetch_misses(
    arena: Tensor,
    layout: ArenaLayout,
    slab_table: Tensor,
    block_tables: Tensor,
    seats: Tensor,
    required: Tensor,
    slots: Tensor,
    missed: Tensor,
    pool: Tensor,
    out: Tensor,
    fetched: Tensor | None = None,
) -> None:
    """Copy the rows of missed positions into the slots that they took, and say where every slot lies in the pool.

    arena: uint8 [bytes]. slab_table: int32 [seats, I], see `offsets_by_table`. block_tables: int64 [seats, H_kv,
    blocks], of the same layer. seats: int64 [B]. required, slots: int64 [B, H_kv, R], missed: bool alike: what
    `resolve` was asked and gave. pool: [num_slots, 2d], contiguous; written in place. out: int32 [B, H_kv, R],
    contiguous in R only: every slot's pool row, -1 where there is no slot. fetched: int64 [seats] or None; the rows
    copied for each seat are added. A row that the arena does not have is neither copied nor counted.
    """
    pool_rows(block_tables, seats, slots, out)
    if not missed.any():
        return
    num_slabs = arena.shape[0] // layout.slab_bytes
    offsets = offsets_by_table(slab_table, seats, required, layout, num_slabs)
    offsets = offsets.where(missed & (slots >= 0), -1)
    gather_rows(arena, offsets, pool, out)
    if fetched is not None:
        fetched.index_add_(0, seats, (offsets >= 0).sum(dim=(1, 2)))


def _in_arena(arena: Tensor, offsets: Tensor, row_bytes: int) -> Tensor:
    return (offsets >= 0) & (offsets <= arena.shape[0] - row_bytes)


def _rows(arena: Tensor, row_elements: int, dtype: torch.dtype) -> Tensor:
    """Every place of the arena at which a row could begin, as that row: a view that overlaps itself."""
    elements = arena[: arena.shape[0] // dtype.itemsize * dtype.itemsize].view(dtype)
    return elements.unfold(0, row_elements, 1)
