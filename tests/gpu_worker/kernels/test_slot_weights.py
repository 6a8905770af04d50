"""The kernel of a step's attention weights against its reference, and both by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.slot_weights import reference

kernel = pytest.importorskip("gpu_worker.kernels.slot_weights.kernel")


def problem(
    device: torch.device,
    group: int,
    lengths: list[list[int]],
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """Inputs over a pool that holds NaN wherever no slot is filled, blocks in no order, tables a view."""
    batch, num_kv_heads = len(lengths), len(lengths[0])
    generator = torch.Generator().manual_seed(group + head_dim)
    num_blocks = max(1, -(-max(map(max, lengths)) // BLOCK_SIZE))
    query = torch.randn(batch, num_kv_heads * group, head_dim, generator=generator).to(dtype)
    blocks = torch.randperm((batch + 1) * num_kv_heads * num_blocks, generator=generator)
    tables = blocks.view(batch + 1, num_kv_heads, num_blocks)
    pool = torch.full((blocks.numel() * BLOCK_SIZE, 2 * head_dim), float("nan"), dtype=dtype)
    seats = torch.arange(batch, 0, -1)
    for row, of_heads in enumerate(lengths):
        for head, length in enumerate(of_heads):
            slots = torch.arange(length)
            places = tables[seats[row], head][slots // BLOCK_SIZE] * BLOCK_SIZE + slots % BLOCK_SIZE
            pool[places, :head_dim] = torch.randn(length, head_dim, generator=generator).to(dtype)
    wide = torch.full((batch + 1, 2, num_kv_heads, num_blocks + 3), 1 << 40)
    wide[:, 1, :, :num_blocks] = tables
    return (
        query.to(device),
        pool.to(device),
        wide.to(device)[:, 1],
        seats.to(device),
        torch.tensor(lengths).to(device),
    )


def check(inputs: tuple[Tensor, ...], longest: int) -> Tensor:
    weights = kernel.slot_weights(*inputs, 0.2, longest)
    torch.testing.assert_close(weights, reference.slot_weights(*inputs, 0.2, longest), atol=1e-6, rtol=1e-4)
    return weights


def test_the_mean_over_a_group_of_softmax_weights(device: torch.device) -> None:
    pool = torch.full((128, 32), math.nan, device=device)
    # Block 1 holds the first head's slots, the second has none; its keys are (0, ...), (1, ...) and what is not filled.
    pool[64:66, :16] = 0
    pool[65, 0] = 1
    query = torch.zeros(1, 4, 16, device=device)
    query[0, 0, 0], query[0, 1, 1] = math.log(3.0) / 0.5, 9.0
    tables, seats = torch.tensor([[[7], [7]], [[1], [7]]], device=device), torch.tensor([1], device=device)
    lengths = torch.tensor([[2, 0]], device=device)
    # 1 : 3 for the first query head, 1 : 1 for the second. The tables have no block for what follows.
    expected = torch.zeros(1, 2, 130, device=device)
    expected[0, 0, :2] = torch.tensor([0.375, 0.625])
    for module in kernel, reference:
        weights = module.slot_weights(query, pool, tables, seats, lengths, 0.5, 130)
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_weights_are_those_of_the_reference(device: torch.device, group: int, num_processors: int) -> None:
    weights = check(problem(device, group, [[1, 64], [65, 130], [0, 7]]), 130)
    assert weights.sum(dim=2).cpu().flatten().tolist() == pytest.approx([1, 1, 1, 1, 0, 1])


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(8, torch.float16), (64, torch.bfloat16), (96, torch.bfloat16), (128, torch.float16)],
)
def test_head_sizes_and_rows_of_16_bits(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    check(problem(device, 4, [[100, 33]], head_dim, dtype), 128)


def test_a_slot_of_little_weight_does_not_hide_the_others(device: torch.device, num_processors: int) -> None:
    """A split far below the others, whichever comes first."""
    query, *where = problem(device, 4, [[300, 170]])
    weights = check((query * 60, *where), 300)
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("longest", [70, 71, 128, 190])
def test_what_lies_beyond_a_head_weighs_nothing(device: torch.device, longest: int) -> None:
    weights = check(problem(device, 3, [[70, 12]]), longest)
    assert weights.shape[2] == longest
    assert not weights[:, 1, 12:].any()


def test_no_rows_are_no_error(device: torch.device) -> None:
    query, pool, tables, seats, lengths = problem(device, 3, [[5, 6]])
    weights = kernel.slot_weights(query[:0], pool, tables, seats[:0], lengths[:0], 1.0, 6)
    assert weights.shape == (0, 2, 6)
