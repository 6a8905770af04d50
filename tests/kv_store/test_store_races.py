"""Test that neither two threads at once nor calls that end half-way leave a slab with two owners."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from store_samples import LAYOUT, SLAB_BYTES, TOKENS, chain, end, known, open_with, random_rows
from waiting import PATIENCE

from kv_store.client import PQParams, StoreClient
from kv_store.errors import FailedPrecondition, OutOfSpace, TrainingFailed
from kv_store.gather import GatherItem, RowReader
from kv_store.index import IterationBound
from kv_store.indexes import BuildRequest, IndexBuilder
from kv_store.put_rows import PutTarget, RowWriter
from kv_store.selection import Selector, TopKItem
from kv_store.state import StoreState
from kv_store.store import Store
from kv_store.trainers import ThreadTrainers, TrainerPool, TrainOutcome, TrainTask


def written(store: Store, state: StoreState, name: str, num_tokens: int) -> None:
    """A sequence with sealed rows."""
    open_with(store, state.epoch, name, num_tokens)
    for layer in range(LAYOUT.num_layers):
        data = random_rows(LAYOUT, num_tokens).tobytes()
        RowWriter(state).put(state.epoch, "w", PutTarget(name, layer, 0, num_tokens), [data])
    store.seal(state.epoch, "w", name, num_tokens, 0, LAYOUT.num_layers)


class TellsOnce:
    """The state's lock, which tells when it was let go of."""

    def __init__(self, lock: Any, told: threading.Event) -> None:
        self._lock = lock
        self._told = told

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()
        self._told.set()


def test_a_gather_that_waited_writes_nothing_where_its_worker_has_attached_again(
    store: Store, state: StoreState
) -> None:
    store.attach("w", LAYOUT, 64)
    earlier = state.workers.find("w")
    assert earlier is not None
    item = GatherItem("a", 0, 0, np.arange(TOKENS, dtype=np.uint64))
    with ThreadPoolExecutor(1) as calls:
        with earlier.gather_lock:
            # Another gather of this life is on its way.
            has_entered, lock = threading.Event(), state.lock
            state.lock = TellsOnce(lock, has_entered)  # type: ignore[assignment]
            gathered = calls.submit(RowReader(state).gather, state.epoch, "w", [item])
            assert has_entered.wait(PATIENCE)
            state.lock = lock
            store.attach("w", LAYOUT, 0)
            # The segment of the earlier life is the sequence's now.
            written(store, state, "a", 20 * TOKENS)
            before = state.arena.data.copy()
        with pytest.raises(FailedPrecondition, match="attach"):
            gathered.result(PATIENCE)
    assert (state.arena.data == before).all()


class RunsAtExit:
    """The state's lock, which does something as soon as it was let go of so many times."""

    def __init__(self, state: StoreState, num_exits: int, act: Callable[[], None]) -> None:
        self._lock = state.lock
        self._left = num_exits
        self._act = act

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()
        self._left -= 1
        if self._left == 0:
            self._act()


def test_slabs_that_were_found_corrupt_are_nobody_elses_by_then(store: Store, state: StoreState) -> None:
    store.attach("w", LAYOUT, 0)
    lock, others = state.lock, tuple(chain(32, "b"))
    open_with(store, state.epoch, "a", 2 * TOKENS)
    end(store, state.epoch, "a", num_tokens=2 * TOKENS, prefix_hashes=tuple(chain(2, "a")))
    store.settle()
    _, table = store.begin(state.epoch, "w", "shares", 0, chain(2, "a"))
    state.arena.data[int(table[0, 0]) * SLAB_BYTES] ^= 1

    def take_all() -> None:
        """The sequence ends meanwhile, and its slabs are another's."""
        state.lock = lock
        end(store, state.epoch, "shares")
        open_with(store, state.epoch, "b", 32 * TOKENS)
        end(store, state.epoch, "b", num_tokens=32 * TOKENS, prefix_hashes=others)

    state.lock = RunsAtExit(state, 2, take_all)  # type: ignore[assignment]
    assert store.verify(state.epoch, "w", "shares") == 1
    assert known(store, state.epoch, list(others)) == 32 * TOKENS


class HalfTrainers(TrainerPool):
    """Takes one head and trains it until told, then takes no more."""

    def __init__(self) -> None:
        self.first: Future[TrainOutcome] = Future()
        self.first.set_running_or_notify_cancel()
        self._taken = 0

    def submit(self, task: TrainTask) -> Future[TrainOutcome]:
        self._taken += 1
        if self._taken > 1:
            raise RuntimeError("can't start new thread")
        return self.first

    def close(self) -> None:
        pass


def test_slabs_are_held_until_every_head_that_was_begun_has_ended(store: Store, state: StoreState) -> None:
    store.attach("w", LAYOUT, 0)
    written(store, state, "a", 4 * TOKENS)
    used, trainers = state.allocator.num_used, HalfTrainers()
    builder = IndexBuilder(state, trainers, IterationBound(4, 1), 0)
    request = BuildRequest("a", 0, 0, 4 * TOKENS, PQParams(2, 4), 0, 0.0)
    with ThreadPoolExecutor(1) as calls:
        built = calls.submit(builder.build, state.epoch, "w", request)
        is_early = threading.Event()
        built.add_done_callback(lambda _: is_early.set())
        assert not is_early.wait(0.2)
        assert state.allocator.num_used > used
        trainers.first.set_result(TrainOutcome(0.0, 1))
        # The cause is told.
        with pytest.raises(TrainingFailed, match="can't start new thread"):
            built.result(PATIENCE)
    assert state.allocator.num_used == used


def test_an_index_is_trained_where_no_more_threads_can_be_started(
    connect: Callable[..., StoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not half of it, which would be trained later, over slabs that are others' by then."""
    client = connect()
    client.begin("a", 2 * TOKENS)
    client.put("a", 0, 0, random_rows(LAYOUT, 2 * TOKENS))
    client.seal("a", 2 * TOKENS, 0, 1)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    built = client.build_index("a", 0, 0, 2 * TOKENS, PQParams(2, 4)).result(PATIENCE)
    assert built.arrays["codes"].shape == (LAYOUT.num_kv_heads, 2 * TOKENS, 2)


class NoBound(IterationBound):
    """Fails once room for the index is there."""

    def effort(self, *arguments: Any) -> Any:
        raise MemoryError


def test_an_index_that_cannot_be_begun_leaves_no_room_taken(store: Store, state: StoreState) -> None:
    store.attach("w", LAYOUT, 0)
    written(store, state, "a", 4 * TOKENS)
    used = state.allocator.num_used
    builder = IndexBuilder(state, HalfTrainers(), NoBound(4, 1), 0)
    with pytest.raises(MemoryError):
        builder.build(state.epoch, "w", BuildRequest("a", 0, 0, 4 * TOKENS, PQParams(2, 4), 0, 0.0))
    assert state.allocator.num_used == used


def test_room_in_one_piece_that_cannot_be_had_costs_nobody_anything(store: Store, state: StoreState) -> None:
    store.attach("w", LAYOUT, 0)
    names = [f"p{number}" for number in range(8)]
    for number, name in enumerate(names):
        # One slab of each layer that stays lies behind each that may go.
        hashes = chain(1, name)
        open_with(store, state.epoch, name, TOKENS)
        open_with(store, state.epoch, f"stays {number}", TOKENS)
        session = "" if number % 2 else f"session {number}"
        end(store, state.epoch, name, num_tokens=TOKENS, prefix_hashes=tuple(hashes), session_id=session)
    open_with(store, state.epoch, "rest", 16 * TOKENS)
    assert state.allocator.num_free == 0
    with pytest.raises(OutOfSpace, match=f"{SLAB_BYTES} bytes"):
        state.allocate_segment(3 * SLAB_BYTES, "an index")
    assert [known(store, state.epoch, chain(1, name)) for name in names] == [TOKENS] * 8
    assert store.stats().num_sessions == 4
    assert len(state.allocate_segment(2 * SLAB_BYTES, "an index")) == 2


def test_two_selections_at_once_know_the_later_tokens_as_one_after_the_other(
    store: Store, state: StoreState
) -> None:
    store.attach("w", LAYOUT, 0)
    num_tokens, lock = 5 * TOKENS, state.lock
    queries = np.random.default_rng(1).standard_normal((LAYOUT.num_kv_heads, 1, LAYOUT.row_format.head_dim))
    trainers = ThreadTrainers(state.arena, 1)
    builder, selector = (
        IndexBuilder(state, trainers, IterationBound(4, 1), 0),
        Selector(state, RowReader(state)),
    )

    def select(name: str, end: int) -> bytes:
        item = TopKItem(name, 0, end, 20, queries.astype("<f4").tobytes(), None)
        return b"".join(selector.chunks(state.epoch, "w", 0, 1.0, [item]))

    for name in "abc":
        written(store, state, name, num_tokens)
        builder.build(state.epoch, "w", BuildRequest(name, 0, 0, 2 * TOKENS, PQParams(2, 4), 0, 0.0))
    ends = (3 * TOKENS + 4, num_tokens)
    expected = {end: select("a", end) for end in ends}

    for name, (outer, inner) in (("b", ends), ("c", ends[::-1])):
        found: dict[int, bytes] = {}

        def interrupt(name: str = name, inner: int = inner, found: dict[int, bytes] = found) -> None:
            state.lock = lock
            found[inner] = select(name, inner)

        state.lock = RunsAtExit(state, 1, interrupt)  # type: ignore[assignment]
        found[outer] = select(name, outer)
        assert found == expected
    trainers.close()
