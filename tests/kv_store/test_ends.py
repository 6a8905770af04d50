"""Test how ended sequences are reported to a store, and what waits for the report."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from waiting import PATIENCE, wait_until

from kv_store.client import StaleEpoch, StoreError, StoreFull, StoreSilent, StoreUnreachable
from kv_store.client.ends import Ends, SequenceEnd

HASH = b"x" * 32


class Store:
    """Is told; while it `hangs` it takes its time."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.failure: Exception | None = None
        self.num_tries = 0
        self.answers = threading.Event()
        self.answers.set()

    def tell(self, ends: Sequence[SequenceEnd]) -> None:
        self.num_tries += 1
        assert self.answers.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure
        self.told.append([end.sequence_id for end in ends])


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def ends(store: Store) -> Iterator[Ends]:
    made = Ends(store.tell, PATIENCE)
    yield made
    made.close(is_drained=False)


def test_nobody_waits_to_put_and_what_comes_meanwhile_is_told_at_once(store: Store, ends: Ends) -> None:
    store.answers.clear()
    ends.put(SequenceEnd("a"))
    wait_until(lambda: store.num_tries)
    for name in ("b", "c", "b"):
        ends.put(SequenceEnd(name))
    # It shares nothing with these.
    ends.settle_for("d", [HASH])
    store.answers.set()
    ends.settle()
    assert store.told == [["a"], ["b", "c"]]


@pytest.mark.parametrize("end", [SequenceEnd("a"), SequenceEnd("b", 64, (HASH,))])
def test_who_has_the_name_or_the_prefix_waits(store: Store, ends: Ends, end: SequenceEnd) -> None:
    ends.put(end)
    ends.settle_for("a", [HASH])
    assert store.told == [[end.sequence_id]]


def test_room_that_is_missing_is_asked_for_again_once_all_is_told(store: Store, ends: Ends) -> None:
    def ask() -> str:
        if not store.told:
            raise StoreFull("no room")
        return "room"

    with pytest.raises(StoreFull):
        ends.with_all_room(ask)
    ends.put(SequenceEnd("a"))
    assert ends.with_all_room(ask) == "room"


@pytest.mark.parametrize("failure", [StoreSilent("hangs"), StoreUnreachable("gone")])
def test_what_was_not_heard_is_told_again_and_nobody_begins_before(
    store: Store, ends: Ends, failure: StoreError
) -> None:
    store.failure = failure
    ends.put(SequenceEnd("a"))
    with pytest.raises(type(failure)):
        ends.settle_for("a", ())
    store.failure = None
    wait_until(lambda: store.told)
    ends.settle_for("a", ())
    assert store.told == [["a"]]


def test_what_fails_unexpectedly_is_told_again(store: Store, ends: Ends) -> None:
    store.failure = ZeroDivisionError("inner")
    ends.put(SequenceEnd("a"))
    with pytest.raises(StoreUnreachable, match="inner"):
        ends.settle()
    store.failure = None
    wait_until(lambda: store.told)
    ends.settle()
    assert store.told == [["a"]]


def test_a_store_that_has_lost_it_is_told_no_more(store: Store, ends: Ends) -> None:
    store.failure = StaleEpoch("restarted")
    ends.put(SequenceEnd("a"))
    ends.settle()
    assert (store.num_tries, store.told) == (1, [])


def test_closing_tells_what_is_left_unless_nobody_hears(store: Store, ends: Ends) -> None:
    ends.put(SequenceEnd("a"))
    ends.close(is_drained=True)
    assert store.told == [["a"]]
    deaf = Store()
    deaf.failure = StoreSilent("hangs")
    others = Ends(deaf.tell, PATIENCE)
    others.put(SequenceEnd("b"))
    others.close(is_drained=True)
    assert deaf.told == []


def test_ends_are_told_in_calls_that_a_message_has_room_for(store: Store, ends: Ends) -> None:
    """A store refuses a longer message whole: what was in it would never end there."""
    store.answers.clear()
    ends.put(SequenceEnd("first"))
    wait_until(lambda: store.num_tries)
    hashes = tuple(number.to_bytes(32) for number in range(200_000))
    for name in ("a", "b", "c"):
        ends.put(SequenceEnd(name, prefix_hashes=hashes))
    ends.put(SequenceEnd("d"))
    store.answers.set()
    ends.settle()
    assert store.told == [["first"], ["a", "b"], ["c", "d"]]
