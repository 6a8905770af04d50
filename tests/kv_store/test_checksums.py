"""Test that damaged slabs of the arena are found, forgotten, and trained again."""

from collections.abc import Callable

import numpy as np
import pytest
from store_samples import LAYOUT, SLAB_BYTES, TOKENS, chain, end, known, open_with, random_rows
from waiting import PATIENCE

from kv_store.client import PQParams, StoreClient
from kv_store.client.checksum import checksum
from kv_store.local import LocalStore
from kv_store.put_rows import PutTarget, RowWriter
from kv_store.state import StoreState
from kv_store.store import Store


@pytest.mark.parametrize("num_bytes", [1, 8, 2048, 2049, 4096, 3 << 20])
def test_any_flipped_bit_and_any_swapped_words_change_the_checksum(num_bytes: int) -> None:
    source = np.random.default_rng(num_bytes)
    data = source.integers(0, 256, num_bytes, np.uint8)
    before = checksum(data)
    for _ in range(20):
        place, bit = int(source.integers(num_bytes)), np.uint8(1 << int(source.integers(8)))
        data[place] ^= bit
        assert checksum(data) != before
        data[place] ^= bit
    assert checksum(data) == before
    if num_bytes > 4096:
        words = data.view(np.uint64)
        words[[3, 300]] = words[[300, 3]]
        assert checksum(data) != before


def listed(store: Store, state: StoreState, name: str, num_slabs: int) -> tuple[list[bytes], np.ndarray]:
    """A prefix of random rows that a sequence has left behind: its names and its slabs."""
    hashes, epoch = chain(num_slabs, name), state.epoch
    table = open_with(store, epoch, name, num_slabs * TOKENS)
    rows = random_rows(LAYOUT, num_slabs * TOKENS)
    for layer in range(LAYOUT.num_layers):
        target = PutTarget(name, layer, 0, num_slabs * TOKENS)
        RowWriter(state).put(epoch, "w", target, [rows.tobytes()])
    end(store, epoch, name, num_tokens=num_slabs * TOKENS, prefix_hashes=tuple(hashes))
    state.checksums.settle()
    return hashes, table


def test_a_corrupt_slab_is_forgotten_with_what_follows_it_and_nothing_else(
    store: Store, state: StoreState
) -> None:
    store.attach("w", LAYOUT, 64)
    epoch = state.epoch
    (hashes, table), (others, _) = listed(store, state, "a", 4), listed(store, state, "b", 3)
    for name in ("first", "second"):
        assert store.begin(epoch, "w", name, 5 * TOKENS, hashes)[0] == 4 * TOKENS
    assert store.verify(epoch, "w", "first") == 0
    state.arena.data[int(table[1, 2]) * SLAB_BYTES + 1000] ^= 4
    # Who shares it is told, each of them; others find what lies before it.
    assert (store.verify(epoch, "w", "first"), store.verify(epoch, "w", "second")) == (1, 1)
    assert known(store, epoch, hashes) == 2 * TOKENS
    assert known(store, epoch, others) == 3 * TOKENS
    # What a sequence over it would list stays unknown.
    end(store, epoch, "first", num_tokens=5 * TOKENS, prefix_hashes=tuple(chain(5, "a")))
    end(store, epoch, "second")
    assert known(store, epoch, hashes) == 2 * TOKENS
    # Rows that are computed again are trusted again.
    assert listed(store, state, "a", 4)[0] == hashes
    assert known(store, epoch, hashes) == 4 * TOKENS
    store.begin(epoch, "w", "third", 0, hashes)
    assert store.verify(epoch, "w", "third") == 0


def test_room_that_is_needed_does_not_wait_for_a_checksum(store: Store, state: StoreState) -> None:
    store.attach("w", LAYOUT, 0)
    for number in range(6):
        # 40 of 64 slabs each: the one before must go at once.
        open_with(store, state.epoch, f"{number}", 20 * TOKENS)
        names = tuple(chain(20, f"{number}"))
        end(store, state.epoch, f"{number}", num_tokens=20 * TOKENS, prefix_hashes=names)
    state.checksums.settle()
    store.begin(state.epoch, "w", "last", 0, names)
    assert store.verify(state.epoch, "w", "last") == 0


def test_an_index_that_is_not_what_was_trained_is_trained_once_more(
    connect: Callable[..., StoreClient], local_store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(transport="zero_copy")
    client.begin("a", 150)
    for layer in range(LAYOUT.num_layers):
        client.put("a", layer, 0, random_rows(LAYOUT, 150))
    client.seal("a", 150)
    good = client.build_index("a", 0, 7, 140, PQParams(2, 4, 6), seed=5).result(PATIENCE)
    wrong = [True]

    def checksum_once_wrong(data: np.ndarray) -> int:
        return checksum(data) ^ (1 if wrong and wrong.pop() else 0)

    monkeypatch.setattr("kv_store.indexes.checksum", checksum_once_wrong)
    again = client.build_index("a", 0, 7, 140, PQParams(2, 4, 6), seed=5).result(PATIENCE)
    assert client.num_corrupt == 1
    assert (again.arrays["codes"] == good.arrays["codes"]).all()


def test_a_session_over_a_corrupt_slab_gives_up_the_room_of_what_is_forgotten(
    store: Store, state: StoreState
) -> None:
    store.attach("w", LAYOUT, 0)
    epoch, table = state.epoch, open_with(store, state.epoch, "a", 20 * TOKENS)
    names = tuple(chain(20, "a"))
    end(store, epoch, "a", num_tokens=20 * TOKENS, prefix_hashes=names, session_id="s")
    state.checksums.settle()
    store.begin(epoch, "w", "shares", 0, names)
    state.arena.data[int(table[1, 2]) * SLAB_BYTES + 1000] ^= 4
    assert store.verify(epoch, "w", "shares") == 1
    end(store, epoch, "shares")
    # What lies before it is still the session's.
    (session,) = store.sessions.list(epoch, "w", "")
    assert session.num_tokens == 2 * TOKENS
    assert store.stats().reserved_bytes == 2 * LAYOUT.num_layers * SLAB_BYTES
    # All of the arena can be had.
    open_with(store, epoch, "all", 32 * TOKENS)
    assert not store.sessions.list(epoch, "w", "")


def test_a_session_of_which_nothing_is_left_is_forgotten(store: Store, state: StoreState) -> None:
    store.attach("w", LAYOUT, 0)
    names, table = listed(store, state, "a", 2)
    store.begin(state.epoch, "w", "holds", 3 * TOKENS, names)
    end(store, state.epoch, "holds", session_id="s")
    store.begin(state.epoch, "w", "shares", 0, names)
    state.arena.data[int(table[0, 0]) * SLAB_BYTES] ^= 4
    assert store.verify(state.epoch, "w", "shares") == 1
    assert not store.sessions.list(state.epoch, "w", "")
