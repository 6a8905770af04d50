"""Decode attention against a loop over single heads and slots, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.attention import attend_blocks, attend_slots
from gpu_worker.kernels.attention.reference import BLOCK_SIZE

# More seats than the three rows, and in another order.
NUM_SEATS, SEATS = 5, [4, 1, 0]
SHAPES = [(group, head_dim) for group in (1, 3, 4, 7, 8) for head_dim in (64, 96, 128)]


def attend_loop(
    query: Tensor, pool: Tensor, slots: list[list[list[int]]], scale: float, bias: Tensor | None = None
) -> Tensor:
    """slots[b][h]: (column, slot) in use, one query head, one slot at a time."""
    batch, num_heads, head_dim = query.shape
    group = num_heads // len(slots[0])
    output = torch.zeros(batch, num_heads, head_dim, dtype=torch.float64)
    for b in range(batch):
        for head in range(num_heads):
            kv_head = head // group
            columns = [column for column, slot in enumerate(slots[b][kv_head]) if slot >= 0]
            if not columns:
                continue
            logits = []
            for column in columns:
                key = pool[slots[b][kv_head][column], :head_dim].double()
                logit = float(query[b, head].double() @ key) * scale
                logits.append(logit + (float(bias[b, kv_head, column]) if bias is not None else 0.0))
            top = max(logits)
            weights = [math.exp(logit - top) for logit in logits]
            for weight, column in zip(weights, columns, strict=True):
                value = pool[slots[b][kv_head][column], head_dim:].double()
                output[b, head] += weight / sum(weights) * value
    return output


def random_problem(
    group: int, head_dim: int, dtype: torch.dtype, num_slots: int, seed: int = 0
) -> tuple[Tensor, Tensor, float]:
    """Query [3, 2 * group, d] of norm enough to make peaks, a pool, and the scale."""
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(3, 2 * group, head_dim, generator=generator)
    pool = torch.randn(num_slots, 2 * head_dim, generator=generator)
    return query.to(dtype), pool.to(dtype), head_dim**-0.5


def seated(rows: Tensor, poison: float = 10**9) -> Tensor:
    """What belongs to the rows at their seats, and at the others what no row may see."""
    at_seats = torch.full((NUM_SEATS, *rows.shape[1:]), poison, dtype=rows.dtype)
    at_seats[SEATS[: len(rows)]] = rows
    return at_seats


def listed(slots: Tensor, num_fixed: int) -> tuple[Tensor, Tensor, Tensor]:
    """fixed, seats, selected."""
    slots = slots.int()
    return seated(slots[..., :num_fixed]), torch.tensor(SEATS[: len(slots)]), slots[..., num_fixed:]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    # The output is rounded to the query's dtype once.
    return {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 8e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim"), SHAPES)
def test_listed_slots_give_the_loops_output(group: int, head_dim: int, dtype: torch.dtype) -> None:
    query, pool, scale = random_problem(group, head_dim, dtype, num_slots=40)
    generator = torch.Generator().manual_seed(1)
    slots = torch.full((3, 2, 11), -1)
    for b in range(3):
        for head in range(2):
            length = (1, 5, 11, 7, 2, 10)[2 * b + head]
            columns = torch.randperm(11, generator=generator)[:length]
            slots[b, head, columns] = torch.randperm(40, generator=generator)[:length]
    expected = attend_loop(query, pool, slots.tolist(), scale)
    for num_fixed in 0, 4, 11:
        output = attend_slots(query, pool, *listed(slots, num_fixed), scale)
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), expected, **tolerance(dtype))


def test_who_has_pads_only_gets_zeros() -> None:
    query, pool, scale = random_problem(3, 64, torch.float32, num_slots=40)
    slots = torch.arange(36).view(3, 2, 6)
    slots[0, 0] = -1
    # One list of pads only, and the other.
    slots[1, 0, :4] = slots[1, 1, 4:] = -1
    output = attend_slots(query, pool, *listed(slots, 4), scale)
    assert torch.equal(output[0, :3], torch.zeros(3, 64))
    expected = attend_loop(query, pool, slots.tolist(), scale)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(attend_slots(query, pool, *listed(slots[..., :0], 0), scale), torch.zeros(3, 6, 64))
    tables, seats = seated(torch.full((3, 2, 2), 10**12)), torch.tensor(SEATS)
    tables[4, 1, 0] = 0
    lengths = torch.tensor([[0, 2], [0, 0], [0, 0]])
    pool = torch.cat([pool[:2], torch.full((62, 128), math.nan)])
    output = attend_blocks(query, pool, tables, seats, lengths, scale, 100)
    expected = attend_loop(query, pool, [[[], [0, 1]], [[], []], [[], []]], scale)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(attend_blocks(query, pool, tables, seats, lengths, scale, 0), torch.zeros(3, 6, 64))


def test_the_bias_adds_to_the_scaled_scores() -> None:
    query, pool, scale = random_problem(3, 64, torch.float32, num_slots=6 * BLOCK_SIZE)
    tables = torch.randperm(6, generator=torch.Generator().manual_seed(2)).view(3, 2, 1)
    lengths = torch.tensor([[6, 6], [2, 6], [64, 5]])
    bias = torch.randn(3, 2, 70, generator=torch.Generator().manual_seed(3)).abs().mul(2)
    # What the bias says of a slot beyond the length must not matter.
    bias = bias.masked_fill(torch.arange(70) >= lengths[..., None], math.nan)
    held = [[loop_slots(tables[b, h].tolist(), int(lengths[b, h])) for h in range(2)] for b in range(3)]
    expected = attend_loop(query, pool, held, scale, bias)
    arguments = query, pool, seated(tables), torch.tensor(SEATS), lengths, scale, 64
    output = attend_blocks(*arguments, seated(bias, math.nan))
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(attend_blocks(*arguments).double(), expected, atol=1e-3)


def test_a_log_degree_bias_counts_a_row_that_often() -> None:
    query, pool, scale = random_problem(4, 64, torch.float32, num_slots=BLOCK_SIZE)
    often = torch.tensor([[[0, 1, 1, 1]] * 2] * 3)
    tables, seats = torch.zeros(NUM_SEATS, 2, 1, dtype=torch.int64), torch.tensor(SEATS)
    bias = torch.tensor([0.0, math.log(3.0)]).expand(NUM_SEATS, 2, 2)
    torch.testing.assert_close(
        attend_blocks(query, pool, tables, seats, torch.full((3, 2), 2), scale, 2, bias),
        attend_slots(query, pool, *listed(often, 2), scale),
    )


def test_poisoned_slots_that_are_not_listed_do_not_reach_the_output() -> None:
    query, pool, scale = random_problem(3, 96, torch.float32, num_slots=30)
    slots = torch.tensor([[[4, -1, 9], [-1, 9, 4]], [[7, -1, -1], [4, 7, 9]], [[9, 4, -1], [-1, -1, 7]]])
    lists = listed(slots, 1)
    clean = attend_slots(query, pool, *lists, scale)
    poisoned = torch.full_like(pool, float("nan"))
    poisoned[[4, 7, 9]] = pool[[4, 7, 9]]
    assert torch.equal(attend_slots(query, poisoned, *lists, scale), clean)


def test_equal_keys_of_extreme_scores_do_not_overflow() -> None:
    pool = torch.cat([torch.full((4, 64), 300.0), torch.arange(4.0)[:, None].expand(4, 64)], dim=1)
    query = torch.full((1, 2, 64), 300.0)
    output = attend_slots(query, pool, *listed(torch.tensor([[[0, 1, 2, 3]] * 2]), 1), 1.0)
    torch.testing.assert_close(output, torch.full((1, 2, 64), 1.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim"), SHAPES)
def test_block_tables_give_the_loops_output(group: int, head_dim: int, dtype: torch.dtype) -> None:
    query, pool, scale = random_problem(group, head_dim, dtype, num_slots=7 * BLOCK_SIZE)
    lengths = torch.tensor([[1, 64], [65, 130], [63, 2]])
    tables = torch.tensor([[[5, 0, 0], [2, 0, 0]], [[6, 1, 0], [3, 0, 4]], [[1, 9, 9], [4, 0, 0]]])
    # Beyond a head's length a table may say anything, and a pool may hold anything.
    tables[0, 0, 1:] = 10**12
    tables[2, 1, 1:] = -7
    held = {(b, h): loop_slots(tables[b, h].tolist(), int(lengths[b, h])) for b in range(3) for h in range(2)}
    used = {slot for slots in held.values() for slot in slots}
    pool[[slot for slot in range(len(pool)) if slot not in used]] = float("nan")
    expected = attend_loop(query, pool, [[held[b, h] for h in range(2)] for b in range(3)], scale)
    for longest in 130, 192, 1000:
        output = attend_blocks(query, pool, seated(tables), torch.tensor(SEATS), lengths, scale, longest)
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), expected, **tolerance(dtype))


def loop_slots(table: list[int], length: int) -> list[int]:
    return [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in range(length)]
