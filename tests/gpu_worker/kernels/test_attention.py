"""How attention is cut into splits, and rows that are late or far away. All else is in the table of `test_contract`."""

from __future__ import annotations

import pytest
import torch
from kernel_contract import on_device
from operations.attention import lists

from gpu_worker.kernels.attention import reference
from gpu_worker.kernels.attention.reference import BLOCK_SIZE, Rest
from gpu_worker.kernels.attention.splits import (
    MAX_SPLITS,
    PROGRAMS_PER_PROCESSOR,
    START_TILES,
    num_splits,
)

kernel = pytest.importorskip("gpu_worker.kernels.attention.kernel")


def written_late(query: torch.Tensor, rows: Rest) -> Rest:
    """Rows that are written when attention asks for them, and not before."""

    def write() -> None:
        late.values.copy_(rows.values)
        late.log_weights.copy_(rows.log_weights)

    late = Rest.room(query, write)
    return late


def test_what_stands_in_is_read_when_it_is_ready(device: torch.device) -> None:
    arguments = on_device(lists(3, 48, torch.float32, ((60, 1), (0, 33)), 70, 37, "some"), device)
    rest = arguments.pop("rest")
    there, late = (
        Rest(rest.values.to(device), rest.log_weights.to(device)),
        written_late(arguments["query"], rest),
    )
    for module in kernel, reference:
        found, expected = (module.attend_slots(**arguments, rest=each) for each in (late, there))
        assert torch.equal(found, expected)


def test_the_number_of_tiles_in_a_split_varies(num_processors: int) -> None:
    """As the cases of the table rely on: 4 rows of 3 tiles."""
    assert num_splits(4, 3, num_processors) == {1: 1, 2: 2, 132: 3}[num_processors]


def test_slots_whose_elements_lie_beyond_int32(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    # Only the pages of the slots that are written come to exist.
    num_slots = 2**31 // 128 + BLOCK_SIZE
    pool = torch.empty(num_slots, 128, device=device, dtype=torch.float16)
    slots = torch.tensor([[[0, num_slots - 1, -1, num_slots - 64]]], device=device, dtype=torch.int32)
    pool[slots[slots >= 0].long()] = torch.randn(3, 128, generator=torch.Generator().manual_seed(3)).to(pool)
    query = torch.ones(1, 1, 64, device=device, dtype=torch.float16)
    seats = torch.zeros(1, device=device, dtype=torch.int64)
    listed = slots[..., :2], seats, slots[..., 2:]
    expected = reference.attend_slots(query, pool, *listed, 0.1)
    torch.testing.assert_close(kernel.attend_slots(query, pool, *listed, 0.1), expected, atol=1e-3, rtol=2e-3)
    tables = torch.tensor([[[num_slots // BLOCK_SIZE - 1]]], device=device)
    output = kernel.attend_blocks(query, pool, tables, seats, torch.tensor([[1]], device=device), 0.1, 1)
    torch.testing.assert_close(output[0, 0], pool[num_slots - BLOCK_SIZE, 64:])


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
