"""Rows are copied to the bit, and no byte beside them is touched."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.kernels.rows import ArenaLayout, reference

kernel = pytest.importorskip("gpu_worker.kernels.rows.kernel")

SHAPES = [
    (64, torch.bfloat16),
    (96, torch.float16),
    (128, torch.float32),
    (6, torch.bfloat16),
    (2, torch.float16),
]


def random_bytes(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8).to(device)


def random_rows(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Any bits, NaN too."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    return random_bytes(*shape[:-1], shape[-1] * itemsize, device=device).view(dtype)


def same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def some_offsets(num_bytes: int, row_bytes: int, count: int) -> torch.Tensor:
    """Rows in any order, some skipped: below 0, and with an end that is beyond the arena's."""
    step = next(power for power in (16, 8, 4) if row_bytes % power == 0)
    base = step * torch.randint(0, 3, ()).item()
    places = torch.randperm((num_bytes - base) // row_bytes)[:count] * row_bytes + base
    places[torch.rand(count) < 0.2] = -1
    places[count // 2] = (num_bytes - row_bytes) // step * step + step
    return places


@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 63])
def test_rows_both_ways(device: torch.device, head_dim: int, dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(count)
    pool = random_rows(80, 2 * head_dim, dtype=dtype, device=device)
    row_bytes = pool.shape[1] * pool.element_size()
    arena = random_bytes(100 * row_bytes + 12, device=device)
    offsets = some_offsets(arena.shape[0], row_bytes, count).to(device)
    slots = torch.randperm(80)[:count].to(device)
    slots[0] = slots[0] if count == 1 else -1
    expected = arena.clone()
    kernel.scatter_rows(arena, offsets, pool, slots)
    reference.scatter_rows(expected, offsets, pool, slots)
    assert same(arena, expected)

    arena, expected = random_bytes(arena.shape[0], device=device), pool.clone()
    kernel.gather_rows(arena, offsets, pool, slots)
    reference.gather_rows(arena, offsets, expected, slots)
    assert same(pool, expected)


@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (2, 33)])
def test_pairs_both_ways(
    device: torch.device, head_dim: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    torch.manual_seed(head_dim)
    # Values are a part of a wider output, keys lie the other way round.
    wide = random_rows(shape[0], (shape[1] + 2) * head_dim, dtype=dtype, device=device)
    values = wide[:, 2 * head_dim :].unflatten(1, (shape[1], head_dim))
    keys = random_rows(shape[1], shape[0], head_dim, dtype=dtype, device=device).transpose(0, 1)
    row_bytes = 2 * head_dim * keys.element_size()
    arena = random_bytes(90 * row_bytes + 4, device=device)
    count = shape[0] * shape[1]
    offsets = some_offsets(arena.shape[0], row_bytes, count).view(shape[1], shape[0]).T.to(device)

    expected = arena.clone()
    kernel.scatter_pairs(arena, offsets, keys, values)
    reference.scatter_pairs(expected, offsets, keys, values)
    assert same(arena, expected)

    arena = random_bytes(arena.shape[0], device=device)
    expected_wide, expected_keys = wide.clone(), keys.clone()
    expected_values = expected_wide[:, 2 * head_dim :].unflatten(1, (shape[1], head_dim))
    kernel.gather_pairs(arena, offsets, keys, values)
    reference.gather_pairs(arena, offsets, expected_keys, expected_values)
    assert same(wide, expected_wide)
    assert same(keys, expected_keys)


@pytest.mark.parametrize(("head_dim", "dtype"), SHAPES)
@pytest.mark.parametrize("num_programs", [3, 1056])
@pytest.mark.parametrize(("num_heads", "num_columns"), [(1, 1), (3, 33), (2, 100)])
def test_misses(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    dtype: torch.dtype,
    num_programs: int,
    num_heads: int,
    num_columns: int,
) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", num_programs)
    torch.manual_seed(num_columns)
    seats, num_seats, num_layers, num_slabs = torch.tensor([3, 1], device=device), 4, 2, 6
    row_bytes = 2 * head_dim * torch.empty((), dtype=dtype).element_size()
    layout = ArenaLayout(16 * num_heads * row_bytes + 32, 16, row_bytes)
    arena = random_bytes(num_slabs * layout.slab_bytes + 20, device=device)
    # Slabs that are none and that are beyond the arena's end.
    slab_table = torch.randint(-1, num_slabs + 1, (num_seats, num_layers, 9), dtype=torch.int32).to(device)
    blocks = torch.randperm(num_seats * num_layers * num_heads * 3)
    block_tables = blocks.view(num_seats, num_layers, num_heads, 3).to(device)
    pool = random_rows(blocks.shape[0] * 64, 2 * head_dim, dtype=dtype, device=device)
    # Some are beyond the table.
    required = torch.stack([torch.randperm(9 * 16 + 8)[:num_columns] for _ in range(2 * num_heads)])
    slots = torch.stack([torch.randperm(3 * 64)[:num_columns] for _ in range(2 * num_heads)])
    is_pad = torch.rand(required.shape) < 0.2
    required, slots = required.masked_fill(is_pad, -1), slots.masked_fill(is_pad, -1)
    # A miss without room has no slot.
    missed = (torch.rand(required.shape) < 0.5) & ~is_pad
    slots[missed & (torch.rand(required.shape) < 0.1)] = -1
    required, slots, missed = (
        t.view(2, num_heads, num_columns).to(device) for t in (required, slots, missed)
    )
    arguments = (slab_table[:, 1], block_tables[:, 1], seats, required, slots, missed)
    expected = pool.clone()
    found = kernel.fetch_misses(arena, layout, *arguments, pool)
    assert torch.equal(found, reference.fetch_misses(arena, layout, *arguments, expected))
    assert same(pool, expected)


def test_offsets_beyond_32_bits_are_kept(device: torch.device) -> None:
    # No such arena fits here: rows that far are skipped, and would be copied if the offset lost its upper half.
    pool = random_rows(4, 32, dtype=torch.bfloat16, device=device)
    before, arena = pool.clone(), random_bytes(640, device=device)
    offsets = torch.tensor([2**32, 2**32 + 64, 2**33, 64], device=device)
    kernel.gather_rows(arena, offsets, pool, torch.arange(4, device=device))
    assert same(pool[:3], before[:3])
    assert same(pool[3], arena[64:128].view(torch.bfloat16))


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
    layout = ArenaLayout(slab_bytes=1032, tokens_per_slab=4, row_bytes=256)
    table = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
    pool = torch.zeros(64, 128, dtype=torch.bfloat16, device=device)
    arena = torch.zeros(2064, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="1032"):
        kernel.fetch_misses(arena, layout, table[0].int(), table, table[0, 0], table, table, table > 0, pool)
