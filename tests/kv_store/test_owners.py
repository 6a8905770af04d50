"""Test whose slabs are evicted when another owner needs memory: an owner's flood leaves what others use."""

from __future__ import annotations

import numpy as np
import pytest
from store_samples import LAYOUT, TOKENS, Clock, chain, end, known

from kv_store.owners import Owners
from kv_store.state import UNUSED_SECONDS, StoreState
from kv_store.store import Store

# Slabs of each layer, of 32 that the arena has.
SIZE = 4


@pytest.fixture
def store(state: StoreState) -> Store:
    store = Store(state)
    store.attach("w", LAYOUT, 0)
    return store


def ask(store: Store, name: str, session: str = "", size: int = SIZE) -> int:
    """A prompt of the owner that is the first letter of its name; returns how many of its slabs were known."""
    epoch, hashes, owner = store.stats().epoch, chain(size, name), name[0]
    num_known, _ = store.begin(epoch, "w", "a", size * TOKENS, hashes, owner=owner)
    end(store, epoch, "a", num_tokens=size * TOKENS, prefix_hashes=tuple(hashes), session_id=session)
    return num_known // TOKENS


def kept(store: Store, *names: str) -> str:
    """Return the names that are wholly known."""
    epoch = store.stats().epoch
    return " ".join(name for name in names if known(store, epoch, chain(SIZE, name)) == SIZE * TOKENS)


@pytest.mark.parametrize("in_sessions", [False, True])
@pytest.mark.parametrize("size", [SIZE, 14])
def test_an_owner_that_floods_takes_its_own_room(store: Store, size: int, in_sessions: bool) -> None:
    documents = ("b1", "b2", "b3", "b4")
    for name in documents:
        ask(store, name)
    for number in range(24):
        assert ask(store, f"a{number}", f"session {number}" if in_sessions else "", size) == 0
        if number % 8 == 7:
            assert [ask(store, name) for name in documents] == [SIZE] * 4
    assert ask(store, "a23", "", size) == size


def test_who_has_all_gives_until_nobody_has_more_than_another(store: Store) -> None:
    for number in range(8):
        ask(store, f"a{number}")
    assert kept(store, *(f"a{number}" for number in range(8))) == "a0 a1 a2 a3 a4 a5 a6 a7"
    for name in ("b1", "c1", "b2", "c2", "b3"):
        ask(store, name)
    everything = ("b1", "b2", "b3", "c1", "c2", *(f"a{number}" for number in range(8)))
    assert kept(store, *everything) == "b1 b2 b3 c1 c2 a5 a6 a7"
    ask(store, "b4")
    # The least recently used of its own.
    assert kept(store, "b4", *everything) == "b4 b2 b3 c1 c2 a5 a6 a7"


def test_who_has_nothing_left_is_not_known_any_more() -> None:
    owners, places = Owners(8), np.arange(8)
    for owner in "abcdefgh":
        owners.take(places[:3], owner)
        owners.take(places[3:5], "z")
        owners.free(places[1:4])
        assert owners.largest_first(owner, 0) == [owner, "z"]
        assert owners.largest_first("z", 1) == ["z", owner]
        assert owners.are_of("z", places[[0, 4]]).tolist() == [False, True]
        owners.free(places[[0, 4]])
        assert owners.largest_first(owner, 5) == []


def test_what_runs_counts_too(store: Store, state: StoreState) -> None:
    for name in ("b1", "b2", "a1"):
        ask(store, name)
    store.begin(state.epoch, "w", "runs", 20 * TOKENS, owner="a")
    store.reserve(state.epoch, "w", "runs", 22 * TOKENS)
    assert kept(store, "b1", "b2", "a1") == "b1 b2"


def test_what_nobody_used_for_long_goes_first_whoevers_it_is(
    store: Store, state: StoreState, clock: Clock
) -> None:
    used = tuple(f"a{number}" for number in range(5))
    ask(store, "b1")
    ask(store, "b2", "of b")
    ask(store, "a5", "of a")
    for name in used:
        ask(store, name)
    clock.now += UNUSED_SECONDS + 1
    store.attach("w", LAYOUT, 0)
    assert [ask(store, name) for name in used] == [SIZE] * 5
    ask(store, "a6")
    assert kept(store, "b1", *used, "a6") == " ".join((*used, "a6"))
    # A session stays while its owner, or who has more, has prefixes of none.
    assert ask(store, "a7") == 0
    assert store.stats().num_sessions == 2
    # Then the one that was used longest ago.
    store.begin(state.epoch, "w", "big", 25 * TOKENS, owner="a")
    assert store.stats().num_sessions == 1
    assert kept(store, "b2", "a5") == "a5"
