"""A prompt, or what is kept of it, goes to the slots of its heads and nowhere else, by Triton and by its definition."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_rig import amid_nan

from gpu_worker.kernels.rows import reference

kernel = pytest.importorskip("gpu_worker.kernels.rows.prompt_kernel")

NUM_SEATS, NUM_LAYERS, NUM_HEADS, NUM_BLOCKS, SEAT, LAYER, ROOM = 3, 4, 2, 20, 1, 2, 5


@pytest.mark.parametrize("counts", [[70, 70], [0, 64], [130, 1, 3, 0], [2, 2, 2, 2], [0, 0]])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(("head_dim", "dtype"), [(16, torch.bfloat16), (6, torch.float32)])
def test_kept_rows_fill_their_slots_and_no_others(
    counts: list[int], padding: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(len(counts) + padding)
    width = max(counts) + padding
    every = torch.arange(width).expand(len(counts), -1)
    positions = (every * 3).where(every < torch.tensor(counts)[:, None], -1)
    # Keys and values as a prompt has them, side by side; of what is no row anything.
    rows = torch.rand(len(counts), width, 2 * head_dim, generator=generator).to(dtype)
    rows[positions < 0] = math.nan
    keys, values = amid_nan(rows).to(device).split(head_dim, dim=-1)
    blocks = torch.randperm(NUM_BLOCKS, generator=generator)[: len(counts) * 3].view(-1, NUM_HEADS, 3)
    tables = torch.full((NUM_SEATS, NUM_LAYERS, NUM_HEADS, 3), 1 << 30)
    tables[SEAT, LAYER : LAYER + len(blocks)] = blocks
    found = []
    for module in kernel, reference:
        pool = torch.full((64 * NUM_BLOCKS, 2 * head_dim), -1.0).to(device, dtype)
        held = torch.full((NUM_SEATS, NUM_LAYERS, NUM_HEADS, 150), 77, device=device)
        lengths, limits = torch.full((2, *held.shape[:3]), 99, dtype=torch.int32, device=device)
        written = (pool, tables.to(device), held, lengths, limits)
        module.keep_rows(positions.to(device), keys, values, *written, SEAT, LAYER, ROOM)
        found.append([each.cpu() for each in written])
    for by_kernel, by_definition in zip(*found, strict=True):
        assert torch.equal(by_kernel, by_definition)
    pool, _, held, lengths, limits = found[0]
    expected, still_empty = torch.full_like(pool, -1.0), torch.full_like(held, 77)
    for head, count in enumerate(counts):
        place = SEAT, LAYER + head // NUM_HEADS, head % NUM_HEADS
        slots = torch.arange(count)
        expected[tables[place][slots // 64] * 64 + slots % 64] = rows[head, :count]
        still_empty[place] = -1
        still_empty[place][:count] = positions[head, :count]
        assert (lengths[place], limits[place]) == (count, count + ROOM)
    assert torch.equal(pool, expected)
    assert torch.equal(held, still_empty)
    others = held[..., 0] == 77
    assert (lengths[others] == 99).all()
    assert (limits[others] == 99).all()


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 150])
@pytest.mark.parametrize("num_stored", [1, 2])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(16, torch.bfloat16), (6, torch.float32), (1, torch.float16)]
)
def test_a_whole_prompt_fills_its_slots_and_no_others(
    num_tokens: int, num_stored: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    # Heads lie further apart than their tokens take.
    room = torch.full((num_stored, NUM_HEADS, num_tokens + 7, 2 * head_dim), math.nan, dtype=dtype)
    rows = room[:, :, :num_tokens]
    rows.copy_(torch.rand(rows.shape, generator=generator))
    blocks = torch.randperm(NUM_BLOCKS, generator=generator)[: num_stored * NUM_HEADS * 3]
    tables = torch.full((NUM_SEATS, NUM_LAYERS, NUM_HEADS, 3), 1 << 30)
    tables[SEAT, LAYER : LAYER + num_stored] = blocks.view(num_stored, NUM_HEADS, 3)
    expected = torch.full((64 * NUM_BLOCKS, 2 * head_dim), -1.0, dtype=dtype)
    slots = torch.arange(num_tokens)
    for layer, of_layer in enumerate(rows):
        for head, of_head in enumerate(of_layer):
            expected[tables[SEAT, LAYER + layer, head][slots // 64] * 64 + slots % 64] = of_head
    on_device = room.to(device)[:, :, :num_tokens]
    for module in kernel, reference:
        pool = torch.full_like(expected, -1.0, device=device)
        module.store_prompt(on_device, pool, tables.to(device), SEAT, LAYER)
        assert torch.equal(pool.cpu(), expected)
        # And back, of one layer, into rows whose heads lie further apart too.
        back = torch.full_like(room[0], math.nan, device=device)
        module.load_prompt(back[:, :num_tokens], pool, tables[SEAT, LAYER].to(device))
        assert torch.equal(back[:, :num_tokens].cpu(), rows[0])
        assert back[:, num_tokens:].isnan().all()
