"""The store's rules without gRPC: two phases, leases, epochs, eviction."""

from concurrent.futures import Future

import numpy as np
import pytest
from store_samples import (
    LAYOUT,
    SLAB_BYTES,
    TOKENS,
    ActsAtExit,
    Clock,
    chain,
    end,
    known,
    open_with,
    random_rows,
)

from kv_store.client import Layout, RowFormat
from kv_store.client.ends import SequenceEnd
from kv_store.client.errors import InvalidStoreRequest, NotInStore, StaleEpoch, StoreFull
from kv_store.rows import GatherItem, PutTarget, RowReader, RowWriter
from kv_store.state import StoreState
from kv_store.store import Store


def cache(store: Store, epoch: int, name: str, num_slabs: int) -> list[bytes]:
    """A sequence that came and went and left its prefix behind."""
    hashes = chain(num_slabs, name)
    open_with(store, epoch, name, num_slabs * TOKENS)
    end(store, epoch, name, num_tokens=num_slabs * TOKENS, prefix_hashes=tuple(hashes))
    return hashes


def test_nothing_is_visible_before_seal(store: Store, state: StoreState) -> None:
    store.attach("w", LAYOUT, 64)
    epoch = state.epoch
    open_with(store, epoch, "a", 40)
    rows = random_rows(LAYOUT, 40)
    RowWriter(state).put(epoch, "w", PutTarget("a", 1, 0, 40), [rows.tobytes()])
    reader = RowReader(state)
    item = GatherItem("a", 1, 1, np.array([33], np.uint64))
    with pytest.raises(InvalidStoreRequest, match="33"):
        reader.gather(epoch, "w", [item])
    store.seal(epoch, "w", "a", 33, 1, 2)
    with pytest.raises(InvalidStoreRequest):
        reader.gather(epoch, "w", [item])
    store.seal(epoch, "w", "a", 34, 1, 2)
    offset, _ = reader.gather(epoch, "w", [item])
    assert (state.arena.data[offset : offset + 64] == rows[1, 33]).all()
    with pytest.raises(InvalidStoreRequest):
        reader.gather(epoch, "w", [GatherItem("a", 0, 1, np.array([0], np.uint64))])


def test_held_bytes_are_exact(store: Store, state: StoreState) -> None:
    open_with(store, state.epoch, "a", 70)
    assert store.stats().held_bytes == 0
    assert store.stats().reserved_bytes == 2 * 3 * SLAB_BYTES
    store.seal(state.epoch, "w", "a", 70, 0, 2)
    store.seal(state.epoch, "w", "a", 70, 0, 2)
    store.seal(state.epoch, "w", "a", 10, 0, 2)
    (sequence,) = store.stats().sequences
    assert sequence.num_tokens == 70
    assert sequence.held_bytes == store.stats().held_bytes == 70 * 2 * 2 * 64
    open_with(store, state.epoch, "b", 70)
    store.seal(state.epoch, "w", "b", 9, 1, 2)
    assert store.stats().sequences[1].num_tokens == 0
    assert store.stats().sequences[1].held_bytes == 9 * 2 * 64
    end(store, state.epoch, "b")
    end(store, state.epoch, "a")
    end(store, state.epoch, "a")
    stats = store.stats()
    assert (stats.held_bytes, stats.reserved_bytes, stats.num_sequences) == (0, 0, 0)


def test_reserve_grows_once_and_repeats_safely(store: Store, state: StoreState) -> None:
    first = open_with(store, state.epoch, "a", 33).copy()
    assert first.shape == (2, 2)
    assert (store.reserve(state.epoch, "w", "a", 64) == first).all()
    grown = store.reserve(state.epoch, "w", "a", 65)
    assert (grown[:, :2] == first).all()
    assert np.unique(grown).size == 6
    assert (open_with(store, state.epoch, "a", 1) == grown).all()


def test_rows_that_arrive_after_a_release_reach_nobody_else(store: Store, state: StoreState) -> None:
    open_with(store, state.epoch, "a", 32)
    taken: list[int] = []

    def release() -> None:
        end(store, state.epoch, "a")
        taken.extend(open_with(store, state.epoch, "b", 32).ravel().tolist())

    state.lock = ActsAtExit(state.lock, release)  # type: ignore[assignment]
    RowWriter(state).put(state.epoch, "w", PutTarget("a", 0, 0, 32), [b"\1" * (32 * 128)])
    assert taken
    written = state.arena.data.reshape(-1, SLAB_BYTES).any(axis=1)
    assert not written[taken].any()
    end(store, state.epoch, "b")
    assert store.stats().reserved_bytes == 0


@pytest.mark.parametrize("sent", [0, 127, 129, 256])
def test_a_stream_of_the_wrong_length_is_refused(store: Store, state: StoreState, sent: int) -> None:
    open_with(store, state.epoch, "a", 32)
    before = state.arena.data.copy()
    with pytest.raises(InvalidStoreRequest, match="128 bytes"):
        RowWriter(state).put(state.epoch, "w", PutTarget("a", 0, 31, 1), [b"\1" * sent])
    # Not a byte outside the token that was announced.
    touched = np.flatnonzero(before != state.arena.data)
    slab = int(store.reserve(state.epoch, "w", "a", 32)[0, 0]) * SLAB_BYTES
    allowed = {slab + (head * TOKENS + 31) * 64 + i for head in range(2) for i in range(64)}
    assert set(touched.tolist()) <= allowed


def test_silence_ends_a_lease(store: Store, state: StoreState, clock: Clock) -> None:
    store.attach("w", LAYOUT, 8)
    store.attach("v", LAYOUT, 8)
    open_with(store, state.epoch, "a", 64)
    open_with(store, state.epoch, "b", 64, "v")
    clock.now += 9.0
    store.heartbeat(state.epoch, "v")
    clock.now += 2.0
    # also before the reaper ran
    for num_reaped in (1, 0):
        with pytest.raises(StaleEpoch, match="attach again"):
            store.reserve(state.epoch, "w", "a", 64)
        assert store.reap() == num_reaped
        assert [sequence.worker_id for sequence in store.stats().sequences] == ["v"]
    end(store, state.epoch, "b", "v")
    clock.now += 11.0
    assert store.reap() == 1
    assert (store.stats().reserved_bytes, store.stats().expired_leases) == (0, 2)


def test_a_sequence_that_cannot_begin_leaves_nothing(
    store: Store, state: StoreState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason: nobody would end it."""
    hashes = cache(store, state.epoch, "a", 2)
    held = store.stats().leased_bytes

    def fail(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(state.allocator, "allocate", fail)
        with pytest.raises(MemoryError):
            store.begin(state.epoch, "w", "b", 4 * TOKENS, hashes)
    assert (store.stats().num_sequences, store.stats().leased_bytes) == (0, held)


def test_what_cannot_be_listed_is_freed_all_the_same(
    store: Store, state: StoreState, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(state.prefixes, "publish", fail)
    for name in ("a", "b"):
        open_with(store, state.epoch, name, TOKENS)
    kept = SequenceEnd("a", TOKENS, tuple(chain(1)))
    with pytest.raises(MemoryError):
        store.end(state.epoch, "w", [kept, SequenceEnd("b")])
    assert (store.stats().num_sequences, store.stats().reserved_bytes) == (0, 0)


def test_layouts_must_agree_while_anyone_is_attached(store: Store, state: StoreState, clock: Clock) -> None:
    other = Layout(2, 2, RowFormat(16, "fp16"))
    with pytest.raises(StaleEpoch, match="fp16"):
        store.attach("v", other, 0)
    cache(store, state.epoch, "a", 2)
    clock.now += 11.0
    store.attach("v", other, 0)
    assert store.stats().reserved_bytes == 0


def test_a_token_larger_than_a_slab_is_refused(store: Store) -> None:
    with pytest.raises(InvalidStoreRequest, match="--slab-bytes"):
        store.attach("w", Layout(1, 64, RowFormat(128, "fp32")), 0)


def test_a_full_store_names_the_missing_bytes(store: Store, state: StoreState) -> None:
    open_with(store, state.epoch, "a", 20 * TOKENS)  # 40 of 64 slabs
    with pytest.raises(StoreFull, match=f"{2 * SLAB_BYTES} bytes are missing") as caught:
        open_with(store, state.epoch, "b", 13 * TOKENS)
    assert caught.value.missing_bytes == 2 * SLAB_BYTES
    # Nothing is left of it.
    assert (store.stats().reserved_bytes, store.stats().num_sequences) == (40 * SLAB_BYTES, 1)
    assert open_with(store, state.epoch, "b", 12 * TOKENS).shape == (2, 12)


def test_a_prefix_outlives_its_sequence_and_is_shared(store: Store, state: StoreState) -> None:
    hashes = chain(3)
    table = open_with(store, state.epoch, "a", 3 * TOKENS + 5).copy()
    store.seal(state.epoch, "w", "a", 3 * TOKENS + 5, 0, 1, hashes)
    assert known(store, state.epoch, hashes) == 0
    store.seal(state.epoch, "w", "a", 2 * TOKENS, 1, 2)  # two slabs are full in both layers
    end(store, state.epoch, "a")
    for _ in range(2):
        num_tokens, shared = store.begin(state.epoch, "w", "b", 1, [*hashes, b"x" * 32])
        assert num_tokens == 2 * TOKENS
        assert (shared == table[:, :2]).all()
    grown = store.reserve(state.epoch, "w", "b", 3 * TOKENS)
    assert (grown[:, :2] == table[:, :2]).all()
    with pytest.raises(InvalidStoreRequest, match="immutable"):
        RowWriter(state).put(state.epoch, "w", PutTarget("b", 0, 0, 1), [random_rows(LAYOUT, 1).tobytes()])


def test_known_prefixes_tell_how_old_they_are_when_they_are_used_and_given_up(
    store: Store, state: StoreState, clock: Clock
) -> None:
    hashes = cache(store, state.epoch, "a", 3)
    clock.now += 6
    # Not a use: nobody shares it.
    assert known(store, state.epoch, chain(3, "b")) == 0
    assert known(store, state.epoch, hashes[:2]) == 2 * TOKENS
    clock.now += 4
    open_with(store, state.epoch, "all", 32 * TOKENS)
    times = store.stats().times
    assert (sum(times.prefix_reuse_gap.counts), times.prefix_reuse_gap.sum) == (1, 6)
    assert (sum(times.evicted_idle.counts), times.evicted_idle.sum) == (3, 4 + 4 + 10)
    assert (sum(times.evicted_lifetime.counts), times.evicted_lifetime.sum) == (3, 30)


def test_heads_that_wait_for_a_trainer_are_counted(store: Store, state: StoreState) -> None:
    open_with(store, state.epoch, "a", 40)
    state.sequences.get("w", "a").trainings |= {Future(), Future()}
    assert store.stats().num_pending_trainings == 2


def test_a_sequence_that_gives_up_its_own_slabs_still_holds_the_prefix(
    store: Store, state: StoreState
) -> None:
    hashes = cache(store, state.epoch, "first", 3)
    _, table = store.begin(state.epoch, "w", "second", 10 * TOKENS, hashes[:2])
    shared = table[:, :2]
    before = store.stats().reserved_bytes
    for _ in range(2):
        end(store, state.epoch, "second", keeps_prefix=True)
        assert before - store.stats().reserved_bytes == 8 * LAYOUT.num_layers * SLAB_BYTES
    assert (state.allocator.references(shared) == 2).all()
    # It may grow again, and its end frees what is left.
    store.reserve(state.epoch, "w", "second", 3 * TOKENS)
    end(store, state.epoch, "second")
    assert (state.allocator.references(shared) == 1).all()
    end(store, state.epoch, "second", keeps_prefix=True)


def test_eviction_takes_the_oldest_unleased_and_never_a_leased_prefix(
    store: Store, state: StoreState
) -> None:
    epoch = state.epoch
    old, leased, young = (cache(store, epoch, name, 8) for name in ("old", "leased", "young"))  # 48 slabs
    num_tokens, held = store.begin(epoch, "w", "holder", 0, leased)
    assert num_tokens == 8 * TOKENS
    open_with(store, epoch, "big", 12 * TOKENS)  # 24 slabs: 16 free, 8 to evict
    assert known(store, epoch, old) == 4 * TOKENS  # its end went first
    assert known(store, epoch, young) == 8 * TOKENS
    with pytest.raises(StoreFull):
        store.reserve(epoch, "w", "big", 25 * TOKENS)
    assert known(store, epoch, young) == 8 * TOKENS  # a refusal evicts nothing
    taken = store.reserve(epoch, "w", "big", 24 * TOKENS)
    assert not np.intersect1d(taken, held).size
    end(store, epoch, "big")
    assert known(store, epoch, leased) == 8 * TOKENS


def test_without_room_a_sequence_that_takes_less_has_what_is_known_of_its_prefix(
    store: Store, state: StoreState
) -> None:
    hashes = cache(store, state.epoch, "first", 2)
    open_with(store, state.epoch, "big", 30 * TOKENS)  # all but the prefix
    for _ in range(2):
        num_tokens, table = store.begin(state.epoch, "w", "knows", 3 * TOKENS, hashes, takes_less=True)
        assert (num_tokens, table.shape) == (2 * TOKENS, (2, 2))
    num_tokens, table = store.begin(state.epoch, "w", "knows not", TOKENS, chain(1), takes_less=True)
    assert (num_tokens, table.shape) == (0, (2, 0))
    assert [each.sequence_id for each in store.stats().sequences] == ["big", "knows"]


def test_what_is_in_a_session_is_evicted_last_and_the_oldest_session_first(
    store: Store, state: StoreState
) -> None:
    epoch, chains = state.epoch, [chain(8, name) for name in ("s0", "s1", "loose")]
    # 16 slabs each, of 64.
    for number, hashes in enumerate(chains):
        open_with(store, epoch, "a", 8 * TOKENS)
        name = f"s{number}" if number < 2 else ""
        end(store, epoch, "a", num_tokens=8 * TOKENS, prefix_hashes=tuple(hashes), session_id=name)
    open_with(store, epoch, "big", 0)

    def all_known() -> list[int]:
        return [known(store, epoch, hashes) // TOKENS for hashes in chains]

    assert all_known() == [8, 8, 8]
    store.reserve(epoch, "w", "big", 16 * TOKENS)
    # The one that was used last, but is in no session.
    assert all_known() == [8, 8, 0]
    store.reserve(epoch, "w", "big", 20 * TOKENS)
    assert all_known() == [4, 8, 0]
    assert state.sessions.counts.sum() == 16
    with pytest.raises(StoreFull, match=str(2 * SLAB_BYTES)):
        store.reserve(epoch, "w", "big", 33 * TOKENS)
    # A refusal costs no session anything.
    assert all_known() == [4, 8, 0]
    assert store.stats().num_sessions == 1
    store.reserve(epoch, "w", "big", 32 * TOKENS)
    assert all_known() == [0, 0, 0]
    stats = store.stats()
    assert (stats.evicted_bytes, stats.evicted_sessions) == (3 * 16 * SLAB_BYTES, 2)
    # each look at three chains of eight slabs, and what it found
    assert (stats.prefix_lookup_tokens, stats.prefix_hit_tokens) == (
        5 * 24 * TOKENS,
        (24 + 16 + 12 + 12) * TOKENS,
    )
    assert (len(state.sessions), int(state.sessions.counts.sum())) == (0, 0)


def test_slabs_are_listed_by_one_name(store: Store, state: StoreState) -> None:
    epoch, hashes = state.epoch, chain(4, "first")
    store.begin(epoch, "w", "a", 4 * TOKENS, hashes)
    store.seal(epoch, "w", "a", 4 * TOKENS, 0, 2, hashes[:2], "short")
    store.seal(epoch, "w", "a", 4 * TOKENS, 0, 2, hashes, "long")
    # What "short" holds stays; the rest may be listed anew.
    store.sessions.drop(epoch, "w", "long")
    store.seal(epoch, "w", "a", 4 * TOKENS, 0, 2, chain(4, "second"), "late")
    end(store, epoch, "a")
    assert known(store, epoch, hashes) == 2 * TOKENS
    assert known(store, epoch, chain(4, "second")) == 0
    open_with(store, epoch, "all", 32 * TOKENS)


def test_a_sessions_next_turn_takes_the_place_of_the_last(store: Store, state: StoreState) -> None:
    epoch, hashes = state.epoch, chain(8, "turns")
    for length in (4, 8):
        store.begin(epoch, "w", "a", length * TOKENS, hashes[:length])
        for _ in range(2):
            store.seal(epoch, "w", "a", length * TOKENS, 0, 2, hashes[:length], "s")
        end(store, epoch, "a", session_id="s")
    # Of what is not listed nothing is kept, and nothing is let go.
    open_with(store, epoch, "b", TOKENS)
    end(store, epoch, "b", num_tokens=TOKENS, session_id="s")
    assert int(state.sessions.counts.sum()) == 16
    assert state.sessions.counts.max() == 1


def test_one_worker_never_sees_anothers_sequence(store: Store, state: StoreState) -> None:
    store.attach("w", LAYOUT, 8)
    store.attach("v", LAYOUT, 8)
    open_with(store, state.epoch, "a", 32)
    with pytest.raises(NotInStore):
        store.reserve(state.epoch, "v", "a", 32)
    with pytest.raises(NotInStore):
        RowReader(state).gather(state.epoch, "v", [GatherItem("a", 0, 0, np.zeros(1, np.uint64))])
    end(store, state.epoch, "a", "v")
    assert store.stats().num_sequences == 1


@pytest.mark.parametrize(
    ("num_tokens", "begin", "end", "hashes"),
    [
        (33, 0, 2, ()),
        (-1, 0, 2, ()),
        (2**63, 0, 2, ()),
        (1, 2, 2, ()),
        (1, 1, 3, ()),
        (1, -1, 2, ()),
        (32, 0, 2, (b"short",)),
        (32, 0, 2, (b"x" * 32, b"y" * 32)),
    ],
)
def test_seal_checks_its_arguments(
    store: Store, state: StoreState, num_tokens: int, begin: int, end: int, hashes: tuple[bytes, ...]
) -> None:
    open_with(store, state.epoch, "a", 32)
    with pytest.raises(InvalidStoreRequest):
        store.seal(state.epoch, "w", "a", num_tokens, begin, end, hashes)
    assert store.stats().held_bytes == 0


def test_a_prefix_that_has_a_name_twice_is_refused(store: Store, state: StoreState) -> None:
    """Its slabs would be held once and freed twice."""
    first, second = cache(store, state.epoch, "first", 2)
    with pytest.raises(InvalidStoreRequest, match="twice"):
        store.begin(state.epoch, "w", "a", 0, [first, second, first])
    open_with(store, state.epoch, "b", 3 * TOKENS)
    with pytest.raises(InvalidStoreRequest, match="twice"):
        store.seal(state.epoch, "w", "b", 3 * TOKENS, 0, 2, [first, second, second])
    with pytest.raises(InvalidStoreRequest, match="twice"):
        end(store, state.epoch, "b", num_tokens=2 * TOKENS, prefix_hashes=(first, first))
    assert state.allocator.num_free == 64 - 2 * LAYOUT.num_layers
