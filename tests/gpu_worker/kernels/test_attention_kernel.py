"""The split-K attention kernel against its definition. Whatever is not attended is NaN, and so is fresh memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_worker.kernels.attention import kernel, reference
from gpu_worker.kernels.attention.reference import BLOCK_SIZE
from gpu_worker.kernels.attention.splits import MAX_SPLITS, PROGRAMS_PER_PROCESSOR, num_splits

SHAPES = [(group, head_dim, torch.bfloat16) for group in (1, 3, 4, 7, 8, 16) for head_dim in (64, 96, 128)]
FEW_SHAPES = [(1, 128, torch.bfloat16), (3, 96, torch.bfloat16), (16, 64, torch.bfloat16)]
FEW_SHAPES += [
    (8, 128, torch.float16),
    (1, 64, torch.float16),
    (4, 128, torch.float32),
    (7, 96, torch.float32),
]
NUM_SLOTS = 6 * BLOCK_SIZE
TOLERANCES = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 1e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 4e-3, "rtol": 8e-3},
}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch and outputs hold NaN until they are written."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(math.nan))


@pytest.fixture(params=[1, 2, 132])
def num_processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """One split of all tiles, two splits of unequal length, a split for each tile."""
    monkeypatch.setattr(kernel, "_num_processors", lambda _device: request.param)
    return request.param


def problem(
    group: int, head_dim: int, dtype: torch.dtype, device: torch.device, batch: int = 2
) -> tuple[Tensor, Tensor, float]:
    """Query [batch, 2 * group, d] of norm enough to make peaks, a pool of 6 blocks, and the scale."""
    generator = torch.Generator().manual_seed(group + head_dim)
    query = 2 * torch.randn(batch, 2 * group, head_dim, generator=generator)
    pool = torch.randn(NUM_SLOTS, 2 * head_dim, generator=generator)
    return query.to(device, dtype), pool.to(device, dtype), head_dim**-0.5


def assert_attends(output: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, **TOLERANCES[dtype])


def random_slots(lengths: list[list[int]], width: int, device: torch.device, num_slots: int) -> Tensor:
    """Different slots in random columns, -1 in the others."""
    generator = torch.Generator().manual_seed(1)
    slots = torch.full((len(lengths), len(lengths[0]), width), -1)
    for b, row in enumerate(lengths):
        for head, length in enumerate(row):
            columns = torch.randperm(width, generator=generator)[:length]
            slots[b, head, columns] = torch.randperm(num_slots, generator=generator)[:length]
    return slots.to(device)


@pytest.mark.parametrize(("group", "head_dim", "dtype"), SHAPES + FEW_SHAPES[3:])
def test_listed_slots(group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    query, pool, scale = problem(group, head_dim, dtype, device)
    pool[200:] = math.nan
    slots = random_slots([[1, 64], [129, 63]], 130, device, num_slots=200)
    output = kernel.attend_slots(query, pool, slots, scale)
    assert_attends(output, reference.attend_slots(query.float(), pool.float(), slots, scale), dtype)


@pytest.mark.parametrize(("group", "head_dim", "dtype"), FEW_SHAPES)
def test_block_tables(group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    query, pool, scale = problem(group, head_dim, dtype, device)
    lengths = torch.tensor([[1, 64], [65, 130]], device=device)
    tables = torch.tensor([[[2, -7, 9], [0, 10**12, -7]], [[1, 4, 10**12], [1, 0, 5]]], device=device)
    # Block 3 is nobody's, and the others end where the longest that holds them ends.
    pool[3 * BLOCK_SIZE : 4 * BLOCK_SIZE] = math.nan
    pool[2 * BLOCK_SIZE + 1 : 3 * BLOCK_SIZE] = math.nan
    pool[4 * BLOCK_SIZE + 1 : 5 * BLOCK_SIZE] = math.nan
    pool[5 * BLOCK_SIZE + 2 :] = math.nan
    expected = reference.attend_blocks(query.float(), pool.float(), tables, lengths, scale)
    assert_attends(kernel.attend_blocks(query, pool, tables, lengths, scale), expected, dtype)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 192])
def test_every_cut_gives_the_same(length: int, num_processors: int, device: torch.device) -> None:
    dtype = torch.float32
    query, pool, scale = problem(2, 64, dtype, device)
    tables = torch.tensor([[[5, 1, 3], [0, 2, 4]], [[3, 0, 1], [2, 5, 0]]], device=device)
    lengths = torch.tensor([[length, 1], [192, length]], device=device)
    expected = reference.attend_blocks(query.float(), pool.float(), tables, lengths, scale)
    assert_attends(kernel.attend_blocks(query, pool, tables, lengths, scale), expected, dtype)
    capped = kernel.attend_blocks(query, pool, tables, lengths.clamp(max=length), scale, longest=length)
    expected = reference.attend_blocks(
        query.float(), pool.float(), tables, lengths.clamp(max=length), scale, longest=length
    )
    assert_attends(capped, expected, dtype)
    slots = random_slots([[length, 1], [190, length]], 192, device, NUM_SLOTS)[..., :length].contiguous()
    slots[..., 0] = 7
    expected = reference.attend_slots(query.float(), pool.float(), slots, scale)
    assert_attends(kernel.attend_slots(query, pool, slots, scale), expected, dtype)


def test_the_number_of_tiles_in_a_split_varies(num_processors: int) -> None:
    """What the test above relies on: 4 rows of 3 tiles."""
    assert num_splits(4, 3, num_processors) == {1: 1, 2: 2, 132: 3}[num_processors]


def test_a_run_of_pads_longer_than_a_split(num_processors: int, device: torch.device) -> None:
    query, pool, scale = problem(4, 64, torch.float32, device)
    slots = torch.full((2, 2, 192), -1, device=device)
    slots[0, 0, 191] = 3
    slots[0, 1, 0] = 4
    slots[1, 0, 70] = 5
    slots[1, 1, [5, 150]] = torch.tensor([6, 7], device=device)
    pool[8:] = math.nan
    expected = reference.attend_slots(query, pool, slots, scale)
    assert_attends(kernel.attend_slots(query, pool, slots, scale), expected, torch.float32)


def test_who_has_nothing_to_attend_gets_zeros(num_processors: int, device: torch.device) -> None:
    """A captured batch is padded with such sequences."""
    query, pool, scale = problem(4, 64, torch.float32, device)
    slots = torch.full((2, 2, 130), -1, device=device)
    slots[1, 1, 129] = 0
    output = kernel.attend_slots(query, pool, slots, scale)
    assert torch.equal(output[0], torch.zeros_like(output[0]))
    torch.testing.assert_close(output[1, 4:], pool[0, 64:].expand(4, 64))
    tables = torch.full((2, 2, 2), 10**12, device=device)
    tables[1, 1] = 0
    lengths = torch.tensor([[0, 0], [0, 1]], device=device)
    assert torch.equal(kernel.attend_blocks(query, pool, tables, lengths, scale), output)


def test_the_bias_adds_to_the_scaled_scores(num_processors: int, device: torch.device) -> None:
    dtype = torch.float32
    query, pool, scale = problem(3, 96, dtype, device)
    slots = random_slots([[1, 64], [130, 63]], 130, device, NUM_SLOTS)
    bias = 2 * torch.randn(2, 2, 130, generator=torch.Generator().manual_seed(2)).to(device)
    bias = bias.masked_fill(slots < 0, math.nan)
    expected = reference.attend_slots(query.float(), pool.float(), slots, scale, bias)
    assert_attends(kernel.attend_slots(query, pool, slots, scale, bias), expected, dtype)
    strided = bias.mT.contiguous().mT
    assert torch.equal(
        kernel.attend_slots(query, pool, slots, scale, strided),
        kernel.attend_slots(query, pool, slots, scale, bias),
    )


def test_a_listed_slot_of_no_weight_does_not_hide_the_others(device: torch.device) -> None:
    query, pool, scale = problem(3, 64, torch.float32, device)
    slots = random_slots([[64, 64], [130, 130]], 130, device, NUM_SLOTS)
    bias = torch.zeros(2, 2, 130, device=device)
    bias[..., :100] = -math.inf
    slots[:, :, 129] = 9
    expected = reference.attend_slots(query, pool, slots, scale, bias)
    assert_attends(kernel.attend_slots(query, pool, slots, scale, bias), expected, torch.float32)


@pytest.mark.parametrize("sign", [1, -1])
def test_equal_keys_of_extreme_scores_do_not_overflow(
    sign: int, num_processors: int, device: torch.device
) -> None:
    ramp = torch.arange(160.0)[:, None].expand(160, 64)
    pool = torch.cat([torch.full((160, 64), 300.0), ramp], dim=1).to(device)
    query = torch.full((2, 2, 64), sign * 300.0, device=device)
    slots = torch.arange(160, device=device).expand(2, 2, 160)
    torch.testing.assert_close(
        kernel.attend_slots(query, pool, slots, 1.0), torch.full((2, 2, 64), 79.5, device=device)
    )


def test_views_and_int32_ids_are_read_in_place(device: torch.device) -> None:
    query, pool, scale = problem(3, 64, torch.float32, device)
    wide = torch.full((2, 10, 64), math.nan, device=device)
    wide[:, 2:8] = query
    tables = torch.full((2, 4, 2, 5), 10**9, device=device, dtype=torch.int32)
    tables[:, 1, :, :3] = torch.tensor([[[5, 1, 3], [0, 2, 4]], [[3, 0, 1], [2, 5, 0]]], device=device)
    lengths = torch.tensor([70, 133], device=device)[:, None].expand(2, 2)
    expected = reference.attend_blocks(query, pool, tables[:, 1, :, :3].long(), lengths, scale)
    output = kernel.attend_blocks(wide[:, 2:8], pool, tables[:, 1, :, :3], lengths, scale)
    assert_attends(output, expected, torch.float32)
    listed = torch.full((2, 140, 3, 2), 10**9, device=device)
    listed[..., 1, :] = random_slots([[70, 133], [1, 64]], 140, device, NUM_SLOTS).mT
    slots = listed[..., 1, :].mT
    expected = reference.attend_slots(query, pool, slots, scale)
    assert_attends(kernel.attend_slots(wide[:, 2:8], pool, slots, scale), expected, torch.float32)


def test_slots_whose_elements_lie_beyond_int32(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    # Only the pages of the slots that are written come to exist.
    num_slots = 2**31 // 128 + BLOCK_SIZE
    pool = torch.empty(num_slots, 128, device=device, dtype=torch.float16)
    slots = torch.tensor([[[0, num_slots - 1, -1, num_slots - 64]]], device=device)
    pool[slots[slots >= 0]] = torch.randn(3, 128, generator=torch.Generator().manual_seed(3)).to(pool)
    query = torch.ones(1, 1, 64, device=device, dtype=torch.float16)
    output = kernel.attend_slots(query, pool, slots, 0.1)
    assert_attends(output, reference.attend_slots(query, pool, slots, 0.1, None).float(), torch.float16)
    tables = torch.tensor([[[num_slots // BLOCK_SIZE - 1]]], device=device)
    output = kernel.attend_blocks(query, pool, tables, torch.tensor([[1]], device=device), 0.1)
    torch.testing.assert_close(output[0, 0], pool[num_slots - BLOCK_SIZE, 64:])


def test_other_layouts_are_refused(device: torch.device) -> None:
    query, pool, scale = problem(3, 64, torch.float32, device)
    slots = torch.zeros(2, 2, 3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="cast the query"):
        kernel.attend_slots(query.half(), pool, slots, scale)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.attend_slots(query.mT.contiguous().mT, pool, slots, scale)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.attend_slots(query, pool.T.contiguous().T, slots, scale)
    with pytest.raises(ValueError, match=r"not K\|V of 64"):
        kernel.attend_slots(query, pool[:, :96], slots, scale)


def test_a_captured_graph_holds_for_other_lengths_and_slots(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    query, pool, scale = problem(4, 128, torch.bfloat16, device)
    tables = torch.tensor([[[5, 1, 3], [0, 2, 4]], [[3, 0, 1], [2, 5, 0]]], device=device)
    lengths = torch.ones(2, 2, dtype=torch.int64, device=device)
    slots = random_slots([[1, 64], [129, 63]], 130, device, NUM_SLOTS)
    kernel.attend_blocks(query, pool, tables, lengths, scale)
    kernel.attend_slots(query, pool, slots, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of_blocks = kernel.attend_blocks(query, pool, tables, lengths, scale)
        of_slots = kernel.attend_slots(query, pool, slots, scale)
    lengths.copy_(torch.tensor([[192, 64], [65, 130]]))
    slots.copy_(random_slots([[130, 2], [65, 1]], 130, device, NUM_SLOTS))
    graph.replay()
    wide = query.float(), pool.float()
    assert_attends(of_blocks, reference.attend_blocks(*wide, tables, lengths, scale), torch.bfloat16)
    assert_attends(of_slots, reference.attend_slots(*wide, slots, scale), torch.bfloat16)


@pytest.mark.parametrize("num_rows", [1, 8, 48, 192, 1024])
@pytest.mark.parametrize("num_tiles", [0, 1, 32, 2048, 16384])
def test_the_splits_fill_the_processors_with_whole_tiles(num_rows: int, num_tiles: int) -> None:
    splits = num_splits(num_rows, num_tiles, 132)
    assert 1 <= splits <= min(max(1, num_tiles), MAX_SPLITS)
    programs = num_rows * splits
    room = 132 * PROGRAMS_PER_PROCESSOR
    if num_rows * min(num_tiles, MAX_SPLITS) >= room:
        waves = -(-programs // room)
        assert programs / (waves * room) > 0.8
