"""Bookkeeping of slabs: holders, free runs, and last uses."""

import numpy as np
import pytest
from store_samples import Clock

from kv_store.prefixes import LastUses
from kv_store.slabs import SlabAllocator


def test_random_holders_never_overlap_and_everything_comes_back() -> None:
    rng = np.random.default_rng(0)
    allocator = SlabAllocator(97)
    held: list[np.ndarray] = []
    for _ in range(2000):
        if held and rng.random() < 0.48:
            allocator.release(held.pop(rng.integers(len(held))).ravel())
        else:
            rows, count = (int(number) for number in rng.integers(1, 4, size=2))
            if rows * count <= allocator.num_free:
                grown = [slabs for slabs in held if slabs.shape[0] == rows]
                after = grown[-1][:, -1] if grown and rng.random() < 0.5 else None
                held.append(allocator.allocate(rows, count, after))
        ids = [slab for slabs in held for slab in slabs.ravel().tolist()]
        assert len(set(ids)) == len(ids)
        assert all(0 <= slab < 97 for slab in ids)
        assert allocator.num_used == len(ids)
    for slabs in held:
        allocator.release(slabs.ravel())
    assert allocator.num_free == 97
    assert allocator.allocate_run(97) == range(97)


def test_growth_is_contiguous_where_the_next_slabs_are_free() -> None:
    allocator = SlabAllocator(32)
    first = allocator.allocate(2, 2)
    assert first.tolist() == [[0, 1], [2, 3]]
    # Behind slab 1 is another row's, behind slab 3 there is room.
    assert allocator.allocate(2, 2, first[:, -1]).tolist() == [[6, 7], [4, 5]]
    assert allocator.allocate(1, 2, np.array([31], np.int32)).tolist() == [[8, 9]]


def test_rows_without_a_long_run_take_what_is_free() -> None:
    allocator = SlabAllocator(8)
    allocator.allocate(1, 8)
    allocator.release([1, 3, 4, 6])
    assert allocator.allocate(2, 2).tolist() == [[1, 3], [4, 6]]
    assert allocator.num_free == 0


def test_a_run_is_the_tightest_free_one() -> None:
    allocator = SlabAllocator(16)
    allocator.allocate(1, 16)
    allocator.release([0, 1, 2, 3, 4])
    allocator.release([8, 9])
    assert allocator.allocate_run(2) == range(8, 10)
    assert allocator.allocate_run(6) is None
    assert allocator.longest_run(np.empty(0, np.int64)) == 5
    assert allocator.longest_run(np.array([5, 6, 15])) == 7


def test_misuse_is_refused() -> None:
    allocator = SlabAllocator(4)
    slabs = allocator.allocate(1, 1)[0]
    allocator.release(slabs)
    with pytest.raises(RuntimeError):
        allocator.release(slabs)
    with pytest.raises(RuntimeError):
        allocator.retain(slabs)
    with pytest.raises(RuntimeError):
        allocator.allocate(1, 5)


def test_the_least_recently_used_come_first_as_in_a_plain_list(clock: Clock) -> None:
    random, uses, plain = np.random.default_rng(0), LastUses(20, clock), []
    for _ in range(60):
        clock.now += random.integers(2)
        chain = random.choice(20, random.integers(6), replace=False)
        uses.renew(chain)
        # The first of a chain is used last.
        plain = [place for place in plain if place not in chain] + chain[::-1].tolist()
        assert (uses.at[chain] == clock.now).all()
        among = random.permutation(plain)[: random.integers(len(plain) + 1)]
        count = int(random.integers(1, 22))
        assert uses.oldest(among, count).tolist() == [place for place in plain if place in among][:count]
