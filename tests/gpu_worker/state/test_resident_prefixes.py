"""Prefixes are found in slots for as long as these hold them, whoever takes some of them when."""

from __future__ import annotations

import random
from itertools import count

import pytest
import torch
from torch import Tensor

from gpu_worker.state.resident_prefixes import ResidentPrefixes
from gpu_worker.state.slot_pool import BlockIds, SlotPool
from kv_store.client import RowFormat

LAYERS, HEADS, WIDTH = 3, 2, 2
SLAB = 64 * WIDTH


def names(prompt: str, number: int) -> tuple[bytes, ...]:
    return tuple(f"{prompt}{slab}".encode() for slab in range(number))


def new_pool(num_blocks: int) -> SlotPool:
    return SlotPool(num_blocks, RowFormat(2, "fp32"), torch.device("cpu"))


def residents(pool: SlotPool, tokens_per_slab: int = SLAB) -> ResidentPrefixes:
    return ResidentPrefixes(pool, tokens_per_slab, LAYERS, HEADS)


def take(pool: SlotPool, num_slabs: int, value: float) -> BlockIds:
    """Blocks of a prompt, whose slots hold this."""
    blocks = pool.allocate(LAYERS * HEADS * num_slabs * WIDTH).reshape(LAYERS, HEADS, -1)
    pool.rows.view(pool.num_blocks, -1)[torch.from_numpy(blocks).flatten()] = value
    return blocks


def loaded(
    pool: SlotPool, found: ResidentPrefixes, wanted: tuple[bytes, ...], layer: int = 0
) -> Tensor | None:
    """Rows of the prefix, nan where none are written; None where it is not found."""
    resident = found.find(wanted)
    rows = torch.full((HEADS, len(wanted) * SLAB, 4), float("nan"))
    return rows if resident is not None and resident.load(layer, rows) else None


def test_a_prompt_that_ended_is_found_until_its_slots_are_taken() -> None:
    pool = new_pool(40)
    known, blocks = residents(pool), take(pool, 2, 7.0)
    assert known.find(names("a", 2)) is None
    known.keep(names("a", 2), blocks)
    pool.free(blocks)
    for number in 1, 2:
        rows = loaded(pool, known, names("a", number))
        assert rows is not None
        assert torch.equal(rows, torch.full_like(rows, 7.0))
    assert known.find(names("a", 3)) is None
    assert known.find(names("b", 1)) is None
    # What is free for longer goes first, and then the first layer.
    others = pool.allocate(16)
    assert loaded(pool, known, names("a", 2)) is not None
    pool.free(others[:0])
    held = known.find(names("a", 2))
    pool.allocate(1)
    assert held is not None
    assert [held.is_there(layer) for layer in range(LAYERS)] == [False, True, True]
    assert known.find(names("a", 2)) is None
    # Of its second slab nothing is gone yet, but a prefix begins with the first.
    assert known.find(names("a", 1)) is None


def test_slabs_of_several_prompts_make_one_prefix() -> None:
    pool = new_pool(100)
    known = residents(pool)
    first, rest = take(pool, 1, 1.0), take(pool, 3, 2.0)
    known.keep(names("a", 1), first)
    known.keep(names("a", 4)[1:], rest)
    rows = loaded(pool, known, names("a", 3), layer=2)
    assert rows is not None
    assert torch.equal(rows[:, :, 0], torch.tensor([1.0] * SLAB + [2.0] * 2 * SLAB).expand(HEADS, -1))
    # In the order of the prefix, whatever was noted first.
    known.keep((names("b", 2)[1],), first)
    known.keep((names("b", 2)[0],), rest[:, :, :WIDTH])
    rows = loaded(pool, known, names("b", 2))
    assert rows is not None
    assert torch.equal(rows[0, :, 0], torch.tensor([2.0] * SLAB + [1.0] * SLAB))


def test_a_compressed_prompt_leaves_its_rows_in_slots_of_nobody() -> None:
    pool = new_pool(60)
    known, whole = residents(pool), torch.arange(3 * SLAB * HEADS * 4.0).view(HEADS, 3 * SLAB, 4)
    # The last slab is not full.
    rows, prompt = whole[:, :-1], names("a", 2)
    left = known.leave(prompt, 0)
    assert left is not None
    for layer in range(LAYERS):
        assert known.find(prompt) is None
        left.put(range(layer, layer + 1), rows[None] + layer)
    assert known.find(prompt) is None
    left.publish()
    assert pool.num_free_blocks == 60
    for layer in range(LAYERS):
        found = loaded(pool, known, prompt, layer)
        assert found is not None
        assert torch.equal(found, rows[:, : 2 * SLAB] + layer)
    # Of what follows on it the rest only.
    assert known.leave(prompt, 2) is None
    more = known.leave(names("a", 3), 2)
    assert more is not None
    assert more.begin == 2 * SLAB
    # All layers' at once, without those that are known.
    every = torch.stack([whole + layer for layer in range(LAYERS)])
    more.put(range(LAYERS), every[:, :, SLAB:], SLAB)
    more.publish()
    for layer in range(LAYERS):
        found = loaded(pool, known, names("a", 3), layer)
        assert found is not None
        assert torch.equal(found, whole + layer)


def test_where_slots_are_missing_nothing_is_left() -> None:
    pool = new_pool(13)
    known = residents(pool)
    left = known.leave(names("a", 1), 0)
    assert left is not None
    rows = torch.zeros(HEADS, SLAB, 4)
    left.put(range(1), rows[None])
    held = pool.allocate(12)
    left.put(range(1, 2), rows[None])
    pool.free(held)
    left.put(range(2, 3), rows[None])
    left.publish()
    assert known.find(names("a", 1)) is None
    # It would overwrite itself.
    assert known.leave(names("a", 2), 0) is None


@pytest.mark.parametrize("tokens_per_slab", [0, 96])
def test_slabs_of_no_whole_blocks_are_not_found(tokens_per_slab: int) -> None:
    pool = new_pool(40)
    known = residents(pool, tokens_per_slab)
    assert known.num_blocks(names("a", 4)) == 0
    assert known.leave(names("a", 4), 0) is None
    assert known.find(()) is None


def test_no_more_is_noted_than_the_pool_can_hold() -> None:
    pool = new_pool(LAYERS * HEADS * WIDTH * 3)
    known, blocks = residents(pool), take(pool, 3, 1.0)
    known.keep(names("a", 3), blocks)
    known.keep(names("b", 1), blocks[:, :, :WIDTH])
    assert known.find(names("a", 1)) is None
    assert known.find(names("a", 3)[1:]) is not None
    assert known.find(names("b", 1)) is not None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_what_is_found_is_right(seed: int) -> None:
    chance = random.Random(seed)
    pool = new_pool(LAYERS * HEADS * WIDTH * 9)
    known, running, values = residents(pool), list[BlockIds](), dict[bytes, float]()
    num_found = 0
    for value in map(float, count(1)):
        if value == 120:
            break
        prompt = names(f"{chance.randrange(6)}", chance.randint(1, 3))
        if (rows := loaded(pool, known, prompt, chance.randrange(LAYERS))) is not None:
            num_found += 1
            expected = [values[name] for name in prompt for _ in range(SLAB)]
            assert rows[0, :, 0].tolist() == expected
        if LAYERS * HEADS * WIDTH * len(prompt) <= pool.num_free_blocks:
            blocks = take(pool, len(prompt), value)
            known.keep(prompt, blocks)
            values |= dict.fromkeys(prompt, value)
            running.append(blocks)
        while running and chance.random() < 0.6:
            pool.free(running.pop(chance.randrange(len(running))))
    assert num_found > 10
