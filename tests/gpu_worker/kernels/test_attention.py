"""Split-K decode attention against its definition, and that against a loop over heads and slots in float64.

Whatever is not attended is NaN, and so is fresh memory.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.attention import reference
from gpu_worker.kernels.attention.reference import BLOCK_SIZE, Rest
from gpu_worker.kernels.attention.splits import (
    MAX_SPLITS,
    PROGRAMS_PER_PROCESSOR,
    START_TILES,
    num_splits,
)

kernel = pytest.importorskip("gpu_worker.kernels.attention.kernel")

SHAPES = [
    (1, 128, torch.bfloat16),
    (3, 96, torch.bfloat16),
    (16, 128, torch.bfloat16),
    (8, 64, torch.float16),
    (7, 96, torch.float32),
]
NUM_SLOTS = 6 * BLOCK_SIZE
# More of them than rows, and in another order.
NUM_SEATS, SEATS = 5, [3, 0]
# Of no slot, block or row.
NOWHERE = 10**9
# Blocks of two rows of two heads.
TABLES = [[[5, 1, 3], [0, 2, 4]], [[3, 0, 1], [2, 5, 0]]]
TOLERANCES = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 1e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 4e-3, "rtol": 8e-3},
}


def problem(
    group: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, float]:
    """Query [2, 2 * group, d] of norm enough to make peaks, a pool of 6 blocks, and the scale."""
    generator = torch.Generator().manual_seed(group + head_dim)
    query = 2 * torch.randn(2, 2 * group, head_dim, generator=generator)
    pool = torch.randn(NUM_SLOTS, 2 * head_dim, generator=generator)
    return query.to(device, dtype), pool.to(device, dtype), head_dim**-0.5


def attend_loop(
    query: Tensor, pool: Tensor, held: list[list[Tensor]], scale: float, bias: Tensor | None = None
) -> Tensor:
    """One query head at a time, in float64. held[b][h]: slots of a KV head; bias[b, h]: of each of them."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // len(held[0])
    query, pool = query.double().cpu(), pool.double().cpu()
    for b, head in torch.cartesian_prod(*map(torch.arange, query.shape[:2])).tolist():
        slots = held[b][head // group]
        keys, values = pool[slots].split(query.shape[2], dim=1)
        scores = keys @ query[b, head] * scale
        if bias is not None:
            scores += bias[b, head // group, : len(slots)].cpu()
        output[b, head] = scores.softmax(0) @ values
    return output


def assert_attends(output: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert output.dtype == dtype
    torch.testing.assert_close(output.double().cpu(), expected, **TOLERANCES[dtype])


def random_slots(lengths: list[list[int]], width: int, device: torch.device, num_slots: int) -> Tensor:
    """Different slots in random columns, -1 in the others."""
    generator = torch.Generator().manual_seed(1)
    slots = torch.full((len(lengths), len(lengths[0]), width), -1, dtype=torch.int32)
    for b, row in enumerate(lengths):
        for head, length in enumerate(row):
            columns = torch.randperm(width, generator=generator)[:length]
            slots[b, head, columns] = torch.randperm(num_slots, generator=generator)[:length].int()
    return slots.to(device)


def seated(rows: Tensor, poison: float = NOWHERE) -> Tensor:
    """What belongs to two rows, at their seats."""
    at_seats = torch.full((NUM_SEATS, *rows.shape[1:]), poison, dtype=rows.dtype, device=rows.device)
    at_seats[SEATS] = rows
    return at_seats


def listed(slots: Tensor, num_fixed: int) -> tuple[Tensor, Tensor, Tensor]:
    """fixed, seats, selected."""
    fixed, selected = slots[..., :num_fixed], slots[..., num_fixed:].contiguous()
    return seated(fixed), torch.tensor(SEATS, device=slots.device), selected


def tabled(tables: list[list[list[int]]], device: torch.device) -> tuple[Tensor, Tensor]:
    """block_tables, seats."""
    return seated(torch.tensor(tables, device=device)), torch.tensor(SEATS, device=device)


def assert_lists_attend(
    query: Tensor, pool: Tensor, lists: tuple[Tensor, Tensor, Tensor], scale: float
) -> None:
    fixed, seats, selected = lists
    held = [
        [of_head[of_head >= 0].long() for of_head in row]
        for row in torch.cat([fixed[seats], selected], dim=2).cpu()
    ]
    expected = attend_loop(query, pool, held, scale)
    for module in kernel, reference:
        assert_attends(module.attend_slots(query, pool, *lists, scale), expected, query.dtype)


def assert_tables_attend(
    query: Tensor,
    pool: Tensor,
    tables: tuple[Tensor, Tensor],
    lengths: Tensor,
    scale: float,
    longest: int,
    bias: Tensor | None = None,
) -> None:
    held = []
    for row, of_row in zip(tables[0][tables[1]].cpu(), lengths.tolist(), strict=True):
        places = [torch.arange(length) for length in of_row]
        held.append(
            [
                blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
                for blocks, at in zip(row, places, strict=True)
            ]
        )
    expected = attend_loop(query, pool, held, scale, None if bias is None else bias[tables[1]])
    for attend in kernel.attend_blocks, reference.attend_blocks, reference.attend_blocks_naive:
        output = attend(query, pool, *tables, lengths, scale, longest, bias)
        assert_attends(output, expected, query.dtype)


@pytest.mark.parametrize(("group", "head_dim", "dtype"), SHAPES)
def test_listed_slots(group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    query, pool, scale = problem(group, head_dim, dtype, device)
    pool[200:] = math.nan
    slots = random_slots([[1, 64], [129, 63]], 130, device, num_slots=200)
    # The first list ends in the middle of a tile.
    assert_lists_attend(query, pool, listed(slots, 37), scale)


def test_a_row_that_stands_in_is_attended_as_a_slot_of_its_score_and_value(device: torch.device) -> None:
    query, pool, scale = problem(3, 48, torch.float32, device)
    slots = random_slots([[60, 1], [0, 33]], 70, device, num_slots=200)
    # Of two heads the last slot goes to the row, of one its only one; one has nothing, and stays so.
    fixed, seats, selected = listed(slots, 37)
    weights = torch.full((2, 6), float("-inf"), device=device)
    values = torch.zeros(2, 6, 48, device=device)
    fewer = slots.clone()
    for b, head in (0, 0), (0, 1), (1, 1):
        column = int((slots[b, head] >= 0).nonzero()[-1])
        row = pool[slots[b, head, column].long()]
        weights[b, 3 * head : 3 * head + 3] = query[b, 3 * head : 3 * head + 3] @ row[:48] * scale
        values[b, 3 * head : 3 * head + 3] = row[48:]
        fewer[b, head, column] = -1
    expected = reference.attend_slots(query, pool, fixed, seats, selected, scale).cpu().double()
    for module in kernel, reference:
        rest = written_late(query, values, weights)
        output = module.attend_slots(query, pool, *listed(fewer, 37), scale, rest)
        assert_attends(output, expected, torch.float32)
        assert not output[1, :3].any()


def written_late(query: Tensor, values: Tensor, weights: Tensor) -> Rest:
    """When attention asks for it, and not before."""

    def write() -> None:
        rest.values.copy_(values)
        rest.log_weights.copy_(weights)

    rest = Rest.room(query, write)
    return rest


@pytest.mark.parametrize(("group", "head_dim", "dtype"), SHAPES)
def test_block_tables(group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    query, pool, scale = problem(group, head_dim, dtype, device)
    lengths = torch.tensor([[1, 64], [65, 130]], device=device)
    tables = tabled([[[2, -7, 9], [0, 10**12, -7]], [[1, 4, 10**12], [1, 0, 5]]], device)
    # Block 3 is nobody's, and the others end where the longest that holds them ends.
    pool[3 * BLOCK_SIZE : 4 * BLOCK_SIZE] = math.nan
    pool[2 * BLOCK_SIZE + 1 : 3 * BLOCK_SIZE] = math.nan
    pool[4 * BLOCK_SIZE + 1 : 5 * BLOCK_SIZE] = math.nan
    pool[5 * BLOCK_SIZE + 2 :] = math.nan
    assert_tables_attend(query, pool, tables, lengths, scale, 10**6)


@pytest.mark.parametrize("length", [1, 64, 65, 192])
def test_every_cut_gives_the_same(length: int, num_processors: int, device: torch.device) -> None:
    query, pool, scale = problem(2, 64, torch.float32, device)
    tables = tabled(TABLES, device)
    lengths = torch.tensor([[length, 1], [192, length]], device=device)
    assert_tables_attend(query, pool, tables, lengths, scale, 192)
    assert_tables_attend(query, pool, tables, lengths.clamp(max=length), scale, length)
    slots = random_slots([[length, 1], [190, length]], 192, device, NUM_SLOTS)[..., :length]
    slots[..., 0] = 7
    assert_lists_attend(query, pool, listed(slots, length // 2), scale)


def test_the_number_of_tiles_in_a_split_varies(num_processors: int) -> None:
    """What the test above relies on: 4 rows of 3 tiles."""
    assert num_splits(4, 3, num_processors) == {1: 1, 2: 2, 132: 3}[num_processors]


@pytest.mark.parametrize(("num_fixed", "num_selected"), [(0, 0), (0, 65), (65, 0)])
def test_a_list_may_have_no_places(num_fixed: int, num_selected: int, device: torch.device) -> None:
    query, pool, scale = problem(1, 64, torch.float32, device)
    width = num_fixed + num_selected
    lists = listed(torch.arange(4 * width, device=device).int().view(2, 2, width), num_fixed)
    assert lists[0].shape[2] == num_fixed
    # Memory of no size lies nowhere.
    assert (lists[2].data_ptr() == 0) == (num_selected == 0)
    assert_lists_attend(query, pool, lists, scale)
    if width == 0:
        assert not kernel.attend_slots(query, pool, *lists, scale).any()


def test_a_run_of_pads_longer_than_a_split(num_processors: int, device: torch.device) -> None:
    query, pool, scale = problem(4, 64, torch.float32, device)
    slots = torch.full((2, 2, 192), -1, device=device, dtype=torch.int32)
    slots[0, 0, 191] = 3
    slots[0, 1, 0] = 4
    slots[1, 0, 70] = 5
    slots[1, 1, [5, 150]] = torch.tensor([6, 7], device=device, dtype=torch.int32)
    pool[8:] = math.nan
    assert_lists_attend(query, pool, listed(slots, 100), scale)


def test_who_has_nothing_to_attend_gets_zeros(num_processors: int, device: torch.device) -> None:
    """A captured batch is padded with such sequences."""
    query, pool, scale = problem(4, 64, torch.float32, device)
    slots = torch.full((2, 2, 130), -1, device=device, dtype=torch.int32)
    slots[1, 1, 129] = 0
    output = kernel.attend_slots(query, pool, *listed(slots, 37), scale)
    assert torch.equal(output[0], torch.zeros_like(output[0]))
    assert torch.equal(output[1, :4], torch.zeros_like(output[1, :4]))
    torch.testing.assert_close(output[1, 4:], pool[0, 64:].expand(4, 64))
    tables = tabled([[[10**12] * 2] * 2, [[10**12] * 2, [0, 0]]], device)
    lengths = torch.tensor([[0, 0], [0, 1]], device=device)
    bias = seated(torch.full((2, 2, 128), math.nan, device=device), math.nan)
    bias[SEATS[1], 1, 0] = 1.0
    for added in None, bias:
        assert torch.equal(kernel.attend_blocks(query, pool, *tables, lengths, scale, 128, added), output)


@pytest.mark.parametrize(("group", "head_dim", "dtype"), SHAPES)
@pytest.mark.parametrize("lengths", [(130, 0), (64, 1), (129, 129)])
def test_heads_of_one_length(
    group: int, head_dim: int, dtype: torch.dtype, lengths: tuple[int, int], device: torch.device
) -> None:
    query, pool, scale = problem(group, head_dim, dtype, device)
    tables = [[[5, 1, 3], [0, 2, 4]], [[3, 0, 1], [2, 5, 4]]]
    # What lies behind the end of the first lane's last block, unless the second attends it.
    if lengths[1] < 129:
        for block in 3, 4:
            pool[block * BLOCK_SIZE + 2 : (block + 1) * BLOCK_SIZE] = math.nan
        tables[1] = [[5, 9, 9], [2, 9, 9]]
    each = torch.tensor(lengths, device=device)[:, None].expand(2, 2)
    assert_tables_attend(query, pool, tabled(tables, device), each, scale, max(lengths))


def test_the_bias_adds_to_the_scaled_scores(num_processors: int, device: torch.device) -> None:
    query, pool, scale = problem(3, 96, torch.float32, device)
    tables = tabled(TABLES, device)
    lengths = torch.tensor([[1, 64], [130, 63]], device=device)
    bias = 2 * torch.randn(2, 2, 150, generator=torch.Generator().manual_seed(2)).to(device)
    bias = bias.masked_fill(torch.arange(150, device=device) >= lengths[..., None], math.nan)
    bias = seated(bias, math.nan)
    strided = torch.full((NUM_SEATS, 3, 150, 2), math.nan, device=device)
    strided[:, 1] = bias.mT
    strided = strided[:, 1].mT
    assert strided.stride() == (3 * 150 * 2, 1, 2)
    assert_tables_attend(query, pool, tables, lengths, scale, 130, bias)
    assert torch.equal(
        kernel.attend_blocks(query, pool, *tables, lengths, scale, 130, strided),
        kernel.attend_blocks(query, pool, *tables, lengths, scale, 130, bias),
    )


def test_a_slot_of_no_weight_does_not_hide_the_others(num_processors: int, device: torch.device) -> None:
    query, pool, scale = problem(3, 64, torch.float32, device)
    lengths = torch.tensor([[101, 164], [130, 130]], device=device)
    bias = torch.zeros(NUM_SEATS, 2, 192, device=device)
    bias[..., :100] = -math.inf
    assert_tables_attend(query, pool, tabled(TABLES, device), lengths, scale, 164, bias)


@pytest.mark.parametrize("sign", [1, -1])
def test_equal_keys_of_extreme_scores_do_not_overflow(
    sign: int, num_processors: int, device: torch.device
) -> None:
    ramp = torch.arange(160.0)[:, None].expand(160, 64)
    pool = torch.cat([torch.full((160, 64), 300.0), ramp], dim=1).to(device)
    query = torch.full((2, 2, 64), sign * 300.0, device=device)
    lists = listed(torch.arange(160, device=device).int().expand(2, 2, 160), 37)
    for module in kernel, reference:
        torch.testing.assert_close(
            module.attend_slots(query, pool, *lists, 1.0), torch.full((2, 2, 64), 79.5, device=device)
        )


def test_views_and_int32_tables_are_read_in_place(device: torch.device) -> None:
    query, pool, scale = problem(3, 64, torch.float32, device)
    wide = torch.full((2, 10, 64), math.nan, device=device)
    wide[:, 2:8] = query
    # [seats, layers, H_kv, M], of which one layer
    tables = torch.full((NUM_SEATS, 4, 2, 5), NOWHERE, device=device, dtype=torch.int32)
    within, seats = tabled(TABLES, device)
    tables[:, 1, :, :3] = within
    lengths = torch.tensor([70, 133], device=device)[:, None].expand(2, 2)
    assert_tables_attend(wide[:, 2:8], pool, (tables[:, 1, :, :3], seats), lengths, scale, 133)
    fixed, seats, selected = listed(random_slots([[70, 133], [1, 64]], 140, device, NUM_SLOTS), 45)
    layers = torch.full((NUM_SEATS, 3, 2, 50), NOWHERE, device=device, dtype=torch.int32)
    layers[:, 1, :, :45] = fixed
    turned = torch.full((NUM_SEATS, 95, 3, 2), NOWHERE, device=device, dtype=torch.int32)
    turned[:, :45, 1] = fixed.mT
    of_steps = torch.full((2, 95, 3, 2), NOWHERE, device=device, dtype=torch.int32)
    of_steps[..., 1, :] = selected.mT
    for table in layers[:, 1, :, :45], turned[:, :45, 1].mT:
        assert_lists_attend(wide[:, 2:8], pool, (table, seats, of_steps[..., 1, :].mT), scale)


def test_slots_whose_elements_lie_beyond_int32(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    # Only the pages of the slots that are written come to exist.
    num_slots = 2**31 // 128 + BLOCK_SIZE
    pool = torch.empty(num_slots, 128, device=device, dtype=torch.float16)
    slots = torch.tensor([[[0, num_slots - 1, -1, num_slots - 64]]], device=device, dtype=torch.int32)
    pool[slots[slots >= 0].long()] = torch.randn(3, 128, generator=torch.Generator().manual_seed(3)).to(pool)
    query = torch.ones(1, 1, 64, device=device, dtype=torch.float16)
    seats = torch.zeros(1, device=device, dtype=torch.int64)
    lists = slots[..., :2], seats, slots[..., 2:]
    expected = reference.attend_slots(query, pool, *lists, 0.1).cpu().double()
    assert_attends(kernel.attend_slots(query, pool, *lists, 0.1), expected, torch.float16)
    tables = torch.tensor([[[num_slots // BLOCK_SIZE - 1]]], device=device)
    output = kernel.attend_blocks(query, pool, tables, seats, torch.tensor([[1]], device=device), 0.1, 1)
    torch.testing.assert_close(output[0, 0], pool[num_slots - BLOCK_SIZE, 64:])


def test_other_layouts_are_refused(device: torch.device) -> None:
    query, pool, scale = problem(3, 64, torch.float32, device)
    lists = fixed, seats, selected = listed(torch.zeros(2, 2, 3, dtype=torch.int32, device=device), 1)
    with pytest.raises(ValueError, match="cast the query"):
        kernel.attend_slots(query.half(), pool, *lists, scale)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.attend_slots(query.mT.contiguous().mT, pool, *lists, scale)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.attend_slots(query, pool.T.contiguous().T, *lists, scale)
    with pytest.raises(ValueError, match=r"not K\|V of 64"):
        kernel.attend_slots(query, pool[:, :96], *lists, scale)
    with pytest.raises(ValueError, match="less than 2"):
        kernel.attend_slots(query, pool[:1].expand(2**31, -1), *lists, scale)
    for others in (fixed.long(), seats, selected), (fixed, seats, selected.long()):
        with pytest.raises(ValueError, match="as int32"):
            kernel.attend_slots(query, pool, *others, scale)
    for other in seats.int(), seats[:1], torch.stack([seats, seats], dim=1)[:, 0]:
        with pytest.raises(ValueError, match="2 contiguous int64"):
            kernel.attend_slots(query, pool, fixed, other, selected, scale)
    with pytest.raises(ValueError, match="does not fit"):
        kernel.attend_slots(query, pool, fixed, seats, selected[:, :1], scale)
    tables, lengths = seated(torch.zeros(2, 2, 3, dtype=torch.int64, device=device)), seats.expand(2, 2)
    for bias in torch.zeros(NUM_SEATS, 2, 99, device=device), torch.zeros(NUM_SEATS, 2, 100).double():
        with pytest.raises(ValueError, match="100 float32"):
            kernel.attend_blocks(query, pool, tables, seats, lengths, scale, 100, bias)


def test_a_captured_graph_holds_for_other_lengths_and_slots(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    query, pool, scale = problem(4, 128, torch.bfloat16, device)
    tables, seats = tabled(TABLES, device)
    lengths = torch.ones(2, 2, dtype=torch.int64, device=device)
    bias = torch.randn(NUM_SEATS, 2, 192, device=device)
    fixed, _, selected = listed(random_slots([[1, 64], [129, 63]], 130, device, NUM_SLOTS), 37)
    kernel.attend_blocks(query, pool, tables, seats, lengths, scale, 192, bias)
    kernel.attend_slots(query, pool, fixed, seats, selected, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of_blocks = kernel.attend_blocks(query, pool, tables, seats, lengths, scale, 192, bias)
        of_slots = kernel.attend_slots(query, pool, fixed, seats, selected, scale)
    lengths.copy_(torch.tensor([[192, 64], [65, 130]]))
    slots = random_slots([[130, 2], [65, 1]], 130, device, NUM_SLOTS)
    for old, new in (fixed, slots[..., :37]), (tables, tables[SEATS]):
        old.fill_(NOWHERE)
        old[[1, 4]] = new
    selected.copy_(slots[..., 37:])
    seats.copy_(torch.tensor([1, 4]))
    graph.replay()
    wide = query.float(), pool.float()
    expected = reference.attend_blocks(*wide, tables, seats, lengths, scale, 192, bias)
    assert_attends(of_blocks, expected.double().cpu(), torch.bfloat16)
    expected = reference.attend_slots(*wide, fixed, seats, selected, scale)
    assert_attends(of_slots, expected.double().cpu(), torch.bfloat16)


@pytest.mark.parametrize("num_rows", [8, 32, 48, 64, 128, 192, 256])
def test_a_captured_step_cuts_shorter_rows_as_well_as_their_own_does(num_rows: int) -> None:
    def rounds(splits: int, num_tiles: int) -> int:
        programs = num_rows * splits
        return -(-programs // (132 * PROGRAMS_PER_PROCESSOR)) * (-(-num_tiles // splits) + START_TILES)

    longest = 2048
    splits = num_splits(num_rows, longest, 132, may_be_shorter=True)
    for num_tiles in (longest, 1024, 512, 258, 130):
        own = rounds(num_splits(num_rows, num_tiles, 132), num_tiles)
        assert rounds(splits, num_tiles) <= 1.05 * own


@pytest.mark.parametrize(
    ("num_rows", "num_tiles"), [(1, 0), (1, 16384), (8, 32), (48, 2048), (192, 32), (1024, 1)]
)
def test_the_splits_fill_the_processors_with_whole_tiles(num_rows: int, num_tiles: int) -> None:
    splits = num_splits(num_rows, num_tiles, 132)
    assert 1 <= splits <= min(max(1, num_tiles), MAX_SPLITS)
    programs = num_rows * splits
    room = 132 * PROGRAMS_PER_PROCESSOR
    if num_rows * min(num_tiles, MAX_SPLITS) >= room:
        waves = -(-programs // room)
        assert programs / (waves * room) > 0.8
