"""Rows between arena, pool and new keys and values are copied to the bit, and no byte beside them is touched.

Kernels and references against plain loops, and the references of offsets against the store's own layout.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.rows import ArenaLayout, arena_offsets, fetch_misses, pool_rows, reference
from gpu_worker.row_format import row_format
from kv_store.client import RowFormat
from kv_store.client.layout import Layout, SlabGeometry

kernel = pytest.importorskip("gpu_worker.kernels.rows.kernel")
fetch_kernel = pytest.importorskip("gpu_worker.kernels.rows.fetch_kernel")

SHAPES = [
    (64, torch.bfloat16),
    (96, torch.float16),
    (128, torch.float32),
    (6, torch.bfloat16),
    (2, torch.float16),
]

NUM_HEADS, NUM_SLABS = 3, 5


def random_bytes(*shape: int, device: torch.device) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8).to(device)


def random_rows(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Any bits, NaN too."""
    return random_bytes(*shape[:-1], shape[-1] * dtype.itemsize, device=device).view(dtype)


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def same(mine: Tensor, theirs: Tensor) -> bool:
    return torch.equal(bits(mine), bits(theirs))


def some_offsets(num_bytes: int, row_bytes: int, count: int) -> Tensor:
    """Rows in any order, some skipped: below 0, and with an end that is beyond the arena's."""
    step = next(power for power in (16, 8, 4) if row_bytes % power == 0)
    base = step * torch.randint(0, 3, ()).item()
    places = torch.randperm((num_bytes - base) // row_bytes)[:count] * row_bytes + base
    places[torch.rand(count) < 0.2] = -1
    places[count // 2] = (num_bytes - row_bytes) // step * step + step
    return places


class Copied:
    """Expected contents of the arena, and of rows gathered from it, made by plain loops."""

    def __init__(self, arena: Tensor, offsets: Tensor, rows: Tensor) -> None:
        """rows: bytes [..., row_bytes] of each offset."""
        self.arena, self.rows, row_bytes = arena.clone(), rows.clone(), rows.shape[-1]
        for index, offset in np.ndenumerate(offsets.cpu().numpy()):
            if 0 <= offset <= len(arena) - row_bytes:
                self.arena[offset : offset + row_bytes] = rows[index]
                self.rows[index] = arena[offset : offset + row_bytes]


@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
@pytest.mark.parametrize("count", [1, 16, 63])
def test_rows_both_ways(device: torch.device, head_dim: int, dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(count)
    pool = random_rows(80, 2 * head_dim, dtype=dtype, device=device)
    row_bytes = row_format(head_dim, dtype).row_bytes
    arena = random_bytes(100 * row_bytes + 12, device=device)
    offsets = some_offsets(arena.shape[0], row_bytes, count).to(device)
    slots = torch.randperm(80)[:count].to(device)
    slots[0] = slots[0] if count == 1 else -1
    copied = Copied(arena, offsets.where(slots >= 0, -1), bits(pool)[slots])
    expected = bits(pool).clone()
    expected[slots[slots >= 0]] = copied.rows[slots >= 0]
    for module in kernel, reference:
        scattered, gathered = arena.clone(), pool.clone()
        module.scatter_rows(scattered, offsets, pool, slots)
        module.gather_rows(arena, offsets, gathered, slots)
        assert same(scattered, copied.arena)
        assert same(gathered, expected)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "shape"),
    [
        (*SHAPES[0], (3, 8)),
        (*SHAPES[1], (2, 33)),
        (*SHAPES[2], (1, 1)),
        (*SHAPES[3], (3, 8)),
        (*SHAPES[4], (2, 33)),
    ],
)
def test_pairs_both_ways(
    device: torch.device, head_dim: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    torch.manual_seed(head_dim)
    # Values are a part of a wider output, keys lie the other way round.
    wide = random_rows(shape[0], (shape[1] + 2) * head_dim, dtype=dtype, device=device)
    keys = random_rows(shape[1], shape[0], head_dim, dtype=dtype, device=device).transpose(0, 1)
    row_bytes = row_format(head_dim, dtype).row_bytes
    arena = random_bytes(90 * row_bytes + 4, device=device)
    count = shape[0] * shape[1]
    offsets = some_offsets(arena.shape[0], row_bytes, count).view(shape[1], shape[0]).T.to(device)

    def pairs(keys: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        return keys, wide[:, 2 * head_dim :].unflatten(1, (shape[1], head_dim))

    copied = Copied(arena, offsets, bits(torch.cat(pairs(keys, wide), dim=-1)))
    for module in kernel, reference:
        scattered, new_keys, new_wide = arena.clone(), keys.clone(), wide.clone()
        module.scatter_pairs(scattered, offsets, *pairs(keys, wide))
        module.gather_pairs(arena, offsets, *pairs(new_keys, new_wide))
        assert same(scattered, copied.arena)
        assert same(torch.cat(pairs(new_keys, new_wide), dim=-1), copied.rows)
        assert same(new_wide[:, : 2 * head_dim], wide[:, : 2 * head_dim])


@pytest.mark.parametrize(
    ("head_dim", "dtype", "batch", "num_heads"),
    [(*SHAPES[0], 3, 2), (*SHAPES[1], 2, 6), (*SHAPES[2], 1, 1), (*SHAPES[3], 2, 6), (*SHAPES[4], 3, 2)],
)
@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64])
def test_new_tokens(
    device: torch.device,
    head_dim: int,
    dtype: torch.dtype,
    batch: int,
    num_heads: int,
    slot_type: torch.dtype,
) -> None:
    torch.manual_seed(head_dim)
    # As a projection gives them: Q, K and V in one row.
    projected = random_rows(batch, 4 * num_heads * head_dim, dtype=dtype, device=device)
    heads = projected.unflatten(1, (4 * num_heads, head_dim))
    keys, values = heads[:, 2 * num_heads : 3 * num_heads], heads[:, 3 * num_heads :]
    pool = random_rows(40, 2 * head_dim, dtype=dtype, device=device)
    row_bytes = row_format(head_dim, dtype).row_bytes
    arena = random_bytes(30 * row_bytes + 12, device=device)
    # Slots of one layer of a wider tensor, offsets the other way round.
    slots = torch.randperm(40)[: 3 * batch * num_heads].to(device, slot_type).view(batch, 3, num_heads)[:, 1]
    offsets = some_offsets(arena.shape[0], row_bytes, batch * num_heads).view(num_heads, batch).T.to(device)
    slots[-1, 0] = -1
    rows = bits(torch.cat([keys, values], dim=-1))
    expected = bits(pool).clone()
    expected[slots[slots >= 0].long()] = rows[slots >= 0]
    for module in kernel, reference:
        alone, beside, written = pool.clone(), pool.clone(), arena.clone()
        module.store_token(keys, values, alone, slots)
        module.store_token(keys, values, beside, slots, written, offsets)
        assert same(alone, expected)
        assert same(beside, expected)
        assert same(written, Copied(arena, offsets, rows).arena)


def random_tables(
    num_seats: int, num_heads: int, num_blocks: int, device: torch.device
) -> tuple[Tensor, int]:
    """Block tables of the middle one of three layers; and how many slots all of them have."""
    num_all = num_seats * 3 * num_heads * num_blocks
    tables = torch.randperm(num_all).view(num_seats, 3, num_heads, num_blocks)
    return tables.to(device)[:, 1], num_all * 64


def random_slots(shape: tuple[int, int, int], num_slots: int) -> Tensor:
    """A slot at most once in a head."""
    return torch.stack([torch.randperm(num_slots)[: shape[2]] for _ in range(shape[0] * shape[1])]).view(
        shape
    )


def wide_out(shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where pool rows are written: amid wider rows, filled with what no pool row is; and its middle."""
    wide = torch.full((shape[0], shape[1] + 1, shape[2] + 5), 7777777, dtype=torch.int32, device=device)
    return wide, wide[:, 1:, 2:-3]


@pytest.mark.parametrize(("num_programs", "counts"), [(3, True), (1056, False)])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "num_heads", "num_columns"),
    [(*SHAPES[0], 3, 33), (*SHAPES[1], 2, 100), (*SHAPES[2], 1, 1), (*SHAPES[3], 3, 33), (*SHAPES[4], 1, 65)],
)
def test_misses(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    dtype: torch.dtype,
    num_programs: int,
    num_heads: int,
    num_columns: int,
    counts: bool,
) -> None:
    monkeypatch.setattr(fetch_kernel, "PROGRAMS", num_programs)
    torch.manual_seed(num_columns)
    # The last row is one of padding.
    seats, num_seats, num_layers, num_slabs = torch.tensor([3, 1, 0], device=device), 4, 2, 6
    rows = row_format(head_dim, dtype)
    layout = ArenaLayout(16 * num_heads * rows.row_bytes + 32, 16, rows)
    arena = random_bytes(num_slabs * layout.slab_bytes + 20, device=device)
    # Slabs that are none and that are beyond the arena's end.
    slab_table = torch.randint(-1, num_slabs + 1, (num_seats, num_layers, 9), dtype=torch.int32).to(device)
    block_tables, num_slots = random_tables(num_seats, num_heads, 3, device)
    pool = random_rows(num_slots, 2 * head_dim, dtype=dtype, device=device)
    shape = (3, num_heads, num_columns)
    # Some are beyond the table.
    required, slots = random_slots(shape, 9 * 16 + 8), random_slots(shape, 3 * 64)
    is_pad = torch.rand(shape) < 0.2
    is_pad[2] = True
    required, slots = required.masked_fill(is_pad, -1), slots.masked_fill(is_pad, -1)
    # A miss without room has no slot.
    missed = (torch.rand(shape) < 0.5) & ~is_pad
    slots[missed & (torch.rand(shape) < 0.1)] = -1
    required = required.transpose(0, 2).contiguous().transpose(0, 2)
    arguments = (slab_table[:, 1], block_tables, seats, *(t.to(device) for t in (required, slots, missed)))
    found, expected, copied = wide_out(shape, device), wide_out(shape, device), pool.clone()
    fetched = torch.arange(num_seats, device=device) if counts else None
    expected_counts = torch.arange(num_seats, device=device) if counts else None
    kernel_arguments = (layout, *arguments, pool, found[1])
    fetch_kernel.fetch_misses(arena, *kernel_arguments, fetched)
    reference.fetch_misses(arena, layout, *arguments, copied, expected[1], expected_counts)
    assert torch.equal(found[0], expected[0])
    assert same(pool, copied)
    if fetched is not None:
        assert torch.equal(fetched, expected_counts)
        assert fetched[[0, 2]].tolist() == [0, 2]


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 1), (2, 3, 33), (1, 2, 300), (2, 1, 513)])
def test_pool_rows(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(fetch_kernel, "ITEMS", 64)
    torch.manual_seed(shape[2])
    tables, _ = random_tables(4, shape[1], 10, device)
    seats = torch.tensor([2, 0, 3], device=device)[: shape[0]]
    slots = random_slots(shape, 640)
    slots[torch.rand(shape) < 0.2] = -1
    for each in (
        slots.to(device),
        slots.transpose(0, 2).contiguous().transpose(0, 2).to(device),
        slots[:, :1, :1].to(device).expand(shape),
    ):
        found, expected = wide_out(shape, device), wide_out(shape, device)
        fetch_kernel.pool_rows(tables, seats, each, found[1])
        reference.pool_rows(tables, seats, each, expected[1])
        assert torch.equal(found[0], expected[0])


def test_pool_rows_fill_32_bits(device: torch.device) -> None:
    tables = torch.tensor([[[2**31 // 64 - 1, 0]]], device=device)
    out = torch.zeros(1, 1, 3, dtype=torch.int32, device=device)
    seats, slots = (
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.tensor([[[63, 64, -1]]], device=device),
    )
    fetch_kernel.pool_rows(tables, seats, slots, out)
    assert out.flatten().tolist() == [2**31 - 1, 0, -1]


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 1), (2, 3, 65)])
def test_offsets(device: torch.device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]) -> None:
    monkeypatch.setattr(fetch_kernel, "ITEMS", 64)
    torch.manual_seed(shape[2])
    # Slabs of 2 MiB, so that offsets need more than 32 bits.
    layout, num_slabs = ArenaLayout(2 << 20, 64, RowFormat(128)), 9000
    slab_table = torch.randint(-1, num_slabs + 100, (4, 2, 5), dtype=torch.int32).to(device)[:, 1]
    slab_table[:, 0] = num_slabs - 1
    seats = torch.tensor([2, 0, 3], device=device)[: shape[0]]
    positions = random_slots(shape, 5 * 64 + 30)
    positions[torch.rand(shape) < 0.2] = -1
    for each in positions.to(device), torch.full((1, 1, 1), 63, device=device).expand(shape):
        found = fetch_kernel.offsets_by_table(slab_table, seats, each, layout, num_slabs)
        assert found.dtype == torch.int64
        assert torch.equal(found, reference.offsets_by_table(slab_table, seats, each, layout, num_slabs))
    assert found[0, 0, 0] == (num_slabs - 1) * layout.slab_bytes + 63 * 512


def test_offsets_beyond_32_bits_are_kept(device: torch.device) -> None:
    # No such arena fits here: rows that far are skipped, and would be copied if the offset lost its upper half.
    pool = random_rows(4, 32, dtype=torch.bfloat16, device=device)
    before, arena = pool.clone(), random_bytes(640, device=device)
    offsets = torch.tensor([2**32, 2**32 + 64, 2**33, 64], device=device)
    kernel.gather_rows(arena, offsets, pool, torch.arange(4, device=device))
    assert same(pool[:3], before[:3])
    assert same(pool[3], arena[64:128].view(torch.bfloat16))


def test_nothing_to_do(device: torch.device) -> None:
    pool = random_rows(4, 32, dtype=torch.bfloat16, device=device)
    none, table = torch.zeros(0, 2, 5, dtype=torch.int64, device=device), torch.zeros(3, 2, 1, device=device)
    tables, seats, layout = table.long(), none[:, 0, 0], ArenaLayout(256, 1, RowFormat(16))
    out, arena = none.int(), random_bytes(640, device=device)
    fetch_kernel.pool_rows(tables, seats, none, out)
    fetch_kernel.fetch_misses(
        arena, layout, tables[:, 0].int(), tables, seats, none, none, none > 0, pool, out
    )
    assert fetch_kernel.offsets_by_table(tables[:, 0].int(), seats, none, layout, 2).shape == none.shape
    keys = torch.zeros(0, 2, 16, dtype=torch.bfloat16, device=device)
    kernel.store_token(keys, keys, pool, none[:, :, 0])


@pytest.mark.gpu
def test_arena_in_registered_host_memory(device: torch.device) -> None:
    torch.manual_seed(0)
    arena = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8).pin_memory()
    pool = torch.zeros(2000, 128, dtype=torch.bfloat16, device=device)
    offsets = (torch.randperm(4096)[:2000] * 256).to(device)
    slots = torch.randperm(2000, device=device)
    kernel.gather_rows(arena, offsets, pool, slots)
    rows = arena.view(torch.bfloat16).view(-1, 128)
    assert same(pool[slots].cpu(), rows[offsets.cpu() // 256])
    kernel.scatter_rows(arena, offsets.flip(0), pool, slots)
    torch.cuda.synchronize()
    assert same(rows[offsets.flip(0).cpu() // 256], pool[slots].cpu())


def test_what_cannot_be_copied_in_words_is_refused(device: torch.device) -> None:
    layout = ArenaLayout(slab_bytes=1032, tokens_per_slab=4, row_format=RowFormat(64))
    table = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
    pool = torch.zeros(64, 128, dtype=torch.bfloat16, device=device)
    arena = torch.zeros(2064, dtype=torch.uint8, device=device)
    out = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
    some = (table[0].int(), table, table[0, 0], table, table, table > 0)
    with pytest.raises(ValueError, match="1032"):
        fetch_kernel.fetch_misses(arena, layout, *some, pool, out)


def geometry() -> SlabGeometry:
    # Slabs of 4 tokens, and bytes to spare in each.
    return SlabGeometry(
        Layout(num_layers=1, num_kv_heads=NUM_HEADS, row_format=RowFormat(8)), 4 * NUM_HEADS * 32 + 48
    )


def layout() -> ArenaLayout:
    cut = geometry()
    return ArenaLayout(cut.slab_bytes, cut.tokens_per_slab, cut.layout.row_format)


def test_offsets_are_where_the_store_has_the_rows() -> None:
    cut = geometry()
    arena = np.random.default_rng(0).integers(0, 256, NUM_SLABS * cut.slab_bytes, dtype=np.uint8)
    slab_table = torch.tensor([[2, -1, 0, NUM_SLABS], [4, 1, 3, -1]], dtype=torch.int32)
    seats = torch.tensor([1, 0, 1])
    positions = torch.tensor([0, 3, 4, 5, 11, 12, 15, 16, -1, 999]).expand(3, NUM_HEADS, 10)
    offsets = arena_offsets(layout(), NUM_SLABS, slab_table, seats, positions)
    rows = cut.rows(arena)
    for (row, head, column), offset in np.ndenumerate(offsets.numpy()):
        position = int(positions[row, head, column])
        index = position // cut.tokens_per_slab
        slab = int(slab_table[seats[row], index]) if 0 <= index < 4 else -1
        if not 0 <= slab < NUM_SLABS:
            assert offset == -1
        else:
            there = arena[offset : offset + cut.layout.row_format.row_bytes]
            assert (there == rows[slab, head, position % cut.tokens_per_slab]).all()


def test_misses_are_fetched_into_their_slots() -> None:
    torch.manual_seed(1)
    cut, spot = geometry(), layout()
    arena = torch.randint(0, 256, (NUM_SLABS * cut.slab_bytes,), dtype=torch.uint8)
    slab_table = torch.tensor([[2, 4, -1]], dtype=torch.int32)
    block_tables = torch.tensor([[[1, 5], [0, 3], [4, 2]]])
    required = torch.tensor([6, 1, -1, 9, 2]).expand(1, NUM_HEADS, 5)
    slots = torch.tensor([70, 3, -1, 64, 63]).expand(1, NUM_HEADS, 5)
    missed = torch.tensor([True, False, False, True, True]).expand(1, NUM_HEADS, 5)
    pool = torch.zeros(6 * 64, 16, dtype=torch.bfloat16)
    seats = torch.tensor([0])
    found, fetched = torch.zeros(1, NUM_HEADS, 5, dtype=torch.int32), torch.tensor([40])
    translated = torch.zeros_like(found)
    fetch_misses(arena, spot, slab_table, block_tables, seats, required, slots, missed, pool, found, fetched)
    pool_rows(block_tables, seats, slots, translated)
    assert torch.equal(found, translated)
    assert fetched.tolist() == [40 + 2 * NUM_HEADS]
    assert found[0, 0].tolist() == [5 * 64 + 6, 64 + 3, -1, 5 * 64, 64 + 63]
    rows = cut.rows(arena.numpy())
    expected = torch.zeros_like(pool).view(torch.uint8)
    for head in range(NUM_HEADS):
        # Position 9 is in no slab, so its slot keeps what it had.
        expected[found[0, head, 0]] = torch.from_numpy(rows[4, head, 2])
        expected[found[0, head, 4]] = torch.from_numpy(rows[2, head, 2])
    assert torch.equal(pool.view(torch.uint8), expected)
