"""Memory of seats: there while a seat is taken, of no other, and as much as its tokens use."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from mapped_pages import MappedPages

from gpu_worker.errors import CapacityError
from gpu_worker.policies.base import CacheShape
from gpu_worker.state.seat_memory import SeatLayout, SeatMemory, seated_state, used_pages
from gpu_worker.state.seat_table import SeatTable
from gpu_worker.state.slot_pool import SlotPool
from kv_store.client import RowFormat

PAGE = 4096
CPU = torch.device("cpu")
# Blocks of 2,048 bytes: two to a page.
FORMAT = RowFormat(4, "fp32")
SHAPE = CacheShape(3, 2, 2, 1, FORMAT, 4096, 0.5, CPU)


def pool_of(num_pages: int) -> SlotPool:
    return SlotPool(num_pages * 2, FORMAT, CPU, MappedPages(num_pages * PAGE, PAGE))


def state_of(pool: SlotPool) -> tuple[tuple[torch.Tensor, torch.Tensor], SeatMemory]:
    """By token 4 bytes of each head, and 100 bytes whatever its tokens."""
    return seated_state(
        pool,
        SHAPE,
        lambda shape: (
            shape.seated(4096, dtype=torch.float32, tokens_each=1),
            shape.seated(25, dtype=torch.int32),
        ),
    )


@pytest.mark.parametrize(
    ("num_tokens", "pages"), [(0, 1), (1, 1 + 4), (1024, 1 + 4), (1025, 1 + 8), (4096, 1 + 16)]
)
def test_a_seat_takes_the_pages_that_its_tokens_use(num_tokens: int, pages: int) -> None:
    pool = pool_of(40)
    (by_token, _), memory = state_of(pool)
    assert by_token.shape == (4, 2, 2, 4096)
    assert pool.num_free_blocks == 80
    assert memory.missing_pages(-1, num_tokens) == memory.missing_pages(1, num_tokens) == pages
    memory.take(1, num_tokens)
    assert (memory.num_held_pages(1), pool.num_free_blocks) == (pages, 80 - 2 * pages)
    assert memory.missing_pages(1, num_tokens) == 0
    assert memory.missing_pages(2, num_tokens) == pages
    memory.free(1)
    memory.free(1)
    assert (memory.num_held_pages(1), pool.num_free_blocks) == (0, 80)


def test_pages_are_never_two_seats_and_what_lies_there_stays() -> None:
    """Random seats come, grow and go; each finds what it wrote."""
    draw = random.Random(3)
    pool = pool_of(60)
    (by_token, of_seat), memory = state_of(pool)
    held: dict[int, int] = {}
    for step in range(400):
        seat, num_tokens = draw.randrange(3), draw.choice((1, 900, 1024, 1500, 3000, 4096))
        if draw.random() < 0.3 and seat in held:
            memory.free(seat)
            del held[seat]
        elif num_tokens > held.get(seat, 0):
            memory.take(seat, num_tokens)
            before = held.get(seat, 0)
            by_token[seat, :, :, before:num_tokens] = float(seat)
            of_seat[seat] = seat
            held[seat] = num_tokens
        # Rows of other sequences lie in the blocks that are left.
        blocks = pool.allocate(pool.num_free_blocks)
        pool.rows.view(-1, 64, 8)[torch.from_numpy(blocks)] = -1.0 - step
        pool.free(blocks)
        for one, count in held.items():
            assert bool((by_token[one, :, :, :count] == one).all())
            assert bool((of_seat[one] == one).all())
    for one in list(held):
        memory.free(one)
    assert pool.num_free_blocks == pool.num_blocks


def test_what_a_seat_has_no_memory_for_and_what_padding_writes_hurts_nobody() -> None:
    (by_token, of_seat), memory = state_of(pool_of(40))
    memory.take(0, 1024)
    by_token[0, :, :, :1024] = 7.0
    of_seat[0] = 7
    # Beyond its memory, and on the seat of padding.
    by_token[0, :, :, 1024:] = 1.0
    by_token[memory.padding] = 2.0
    of_seat[memory.padding] = 2
    assert bool((by_token[0, :, :, :1024] == 7.0).all())
    assert bool((of_seat[0] == 7).all())
    memory.take(0, 2048)
    assert bool((by_token[0, :, :, :1024] == 7.0).all())


def test_too_few_pages_are_an_error_and_nothing_is_taken() -> None:
    pool = pool_of(4)
    _, memory = state_of(pool)
    with pytest.raises(CapacityError, match="bytes of slots are missing"):
        memory.take(0, 1)
    assert (memory.num_held_pages(0), pool.num_free_blocks) == (0, 8)


def test_blocks_that_are_partly_taken_go_first_and_pages_are_taken_whole() -> None:
    pool = pool_of(4)
    first = pool.allocate(3)
    assert not pool.has_pages(3)
    assert pool.has_pages(2)
    last = pool.allocate(1)
    # Of the second page, of which one block was taken.
    assert {*first // 2, *last // 2} == {0, 1}
    pages = pool.allocate_pages(2)
    assert sorted(pages.tolist()) == [2, 3]
    pool.free(first)
    # One block of the second page is still another's.
    assert (pool.num_free_blocks, pool.has_pages(1), pool.has_pages(2)) == (3, True, False)
    pool.free(last)
    pool.free_pages(pages)
    assert pool.has_pages(4)
    assert sorted(pool.allocate(8).tolist()) == list(range(8))


@pytest.mark.parametrize("row", [RowFormat(6, "fp32"), RowFormat(64, "fp32")])
def test_blocks_that_no_page_holds_a_whole_number_of_are_taken_with_several_pages(row: RowFormat) -> None:
    block_bytes = 64 * row.row_bytes
    pool = SlotPool(24, row, CPU, MappedPages(24 * block_bytes, PAGE))
    assert pool.num_blocks == 24
    layout = SeatLayout()
    layout.add((1, 1, 3 * PAGE), torch.uint8, 1)
    memory = SeatMemory(pool, 2, layout)
    tensor = memory.tensor((1, 1, 3 * PAGE), torch.uint8, 1)
    memory.take(0, 1)
    memory.take(0, 2 * PAGE)
    memory.take(1, 3 * PAGE)
    tensor[0, ..., : 2 * PAGE], tensor[1] = 1, 2
    blocks = pool.allocate(pool.num_free_blocks)
    pool.rows.view(24, -1)[torch.from_numpy(blocks)] = 9.0
    assert bool((tensor[0, ..., : 2 * PAGE] == 1).all() and (tensor[1] == 2).all())
    memory.free_all()
    pool.free(blocks)
    assert pool.num_free_blocks == 24
    assert pool.has_pages(24 * block_bytes // PAGE)


def test_pages_that_are_used_follow_from_the_intervals_of_all_tensors() -> None:
    draw = random.Random(1)
    for _ in range(50):
        layout = SeatLayout()
        parts = [
            layout.add(
                (2, 3, draw.randrange(1, 900), draw.choice((1, 4))), torch.int16, draw.choice((0, 1, 16))
            )
            for _ in range(3)
        ]
        num_tokens, expected = draw.randrange(1200), np.zeros(-(-layout.num_bytes // 512), np.bool_)
        for part in parts:
            used = part.row_bytes
            if part.tokens_each:
                used = min(used, -(-num_tokens // part.tokens_each) * part.place_bytes)
            for row in range(part.num_rows):
                begin = part.begin + row * part.row_bytes
                for byte in range(begin, begin + used):
                    expected[byte // 512] = True
        assert np.array_equal(used_pages(layout, num_tokens, 512), expected)


def test_a_table_that_is_widened_keeps_what_taken_seats_have() -> None:
    pool = pool_of(60)
    table = SeatTable(pool, SHAPE, torch.int64, empty=-1, spare=1)
    table.make_room(3)
    table.take(1)
    table.table[1] = 5
    narrow = table.table
    table.make_room(300)
    assert table.table is not narrow
    assert (table.width, table.table.shape[3]) == (512, 513)
    assert bool((table.table[1, ..., :4] == 5).all())
    assert bool((table.table[1, ..., 5:] == -1).all())
    assert bool((table.table[3] == -1).all())
    blocks = pool.allocate(pool.num_free_blocks)
    with pytest.raises(CapacityError):
        table.make_room(600)
    assert (table.width, table.table[1, 0, 0, 0].item()) == (512, 5)
    pool.free(blocks)
    table.free(1)
    assert pool.num_free_blocks == pool.num_blocks
