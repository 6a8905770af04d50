"""In which order a disk that is behind is written to, and what is left out."""

from __future__ import annotations

import threading

from store_samples import chain
from waiting import PATIENCE

from kv_store.disk.catalog import Chain
from kv_store.disk.write_queue import MAX_WAITING, MAX_WAITING_SESSIONS, WriteQueue


def test_owners_take_turns_and_who_has_the_most_is_left_out() -> None:
    goes_on, written, skipped = threading.Event(), list[str](), list[int]()

    def write(waiting: Chain) -> None:
        assert goes_on.wait(PATIENCE)
        written.append(waiting.session or waiting.owner)

    queue = WriteQueue(write, lambda unneeded: None, skipped.append, lambda error: None)
    try:
        for _ in range(MAX_WAITING + 10):
            queue.put(Chain(tuple(chain(1)), "a"))
        for owner in "bcb":
            queue.put(Chain(tuple(chain(1)), owner))
        queue.put(Chain(tuple(chain(1)), "a", "session of a"))
        goes_on.set()
        queue.settle()
        assert len(written) + sum(skipped) == MAX_WAITING + 14
        assert [each for each in written if each != "a"] == ["session of a", "b", "c", "b"]
        # One of a may have begun at once.
        assert written.index("c") < 5
        assert len(written) >= MAX_WAITING
    finally:
        goes_on.set()
        queue.close(PATIENCE)


def test_of_a_disk_that_hangs_the_sessions_that_waited_longest_are_left_out() -> None:
    goes_on, written, skipped = threading.Event(), list[str](), list[int]()

    def write(waiting: Chain) -> None:
        assert goes_on.wait(PATIENCE)
        written.append(waiting.session)

    queue = WriteQueue(write, lambda unneeded: None, skipped.append, lambda error: None)
    try:
        names = [f"s{number}" for number in range(MAX_WAITING_SESSIONS + 10)]
        for name in (*names, *names[-5:]):
            queue.put(Chain((), "a", name))
        goes_on.set()
        queue.settle()
        assert sum(skipped) in (9, 10)
        assert set(names[10:]) <= set(written)
        assert len(written) + sum(skipped) == len(names)
    finally:
        goes_on.set()
        queue.close(PATIENCE)
