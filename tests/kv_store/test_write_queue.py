"""In which order a disk that is behind is written to, and what is left out."""

from __future__ import annotations

import errno
import threading

from store_samples import Clock, chain
from waiting import PATIENCE

from kv_store.disk.catalog import Chain, Unneeded
from kv_store.disk.write_queue import MAX_WAITING, MAX_WAITING_SESSIONS, PAUSE_SECONDS, WriteQueue


def test_owners_take_turns_and_who_has_the_most_is_left_out() -> None:
    goes_on, written, skipped = threading.Event(), list[str](), list[int]()

    def write(waiting: Chain) -> None:
        assert goes_on.wait(PATIENCE)
        written.append(waiting.session or waiting.owner)

    queue = WriteQueue(write, lambda unneeded: None, skipped.append, lambda error: None)
    try:
        for number in range(MAX_WAITING + 10):
            queue.put(Chain(tuple(chain(1, str(number))), "a"))
        for number, owner in enumerate("bcb"):
            queue.put(Chain(tuple(chain(1, str(number))), owner))
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


def test_a_prefix_that_waits_already_takes_nobody_elses_place() -> None:
    """It is told of whenever a sequence over it is sealed."""
    goes_on, has_begun = threading.Event(), threading.Event()
    written, skipped = list[Chain](), list[int]()

    def write(waiting: Chain) -> None:
        has_begun.set()
        assert goes_on.wait(PATIENCE)
        written.append(waiting)

    queue = WriteQueue(write, lambda unneeded: None, skipped.append, lambda error: None)
    first, *others = (Chain(tuple(chain(2, name)), "a") for name in "abc")
    try:
        queue.put(first)
        assert has_begun.wait(PATIENCE)
        for _ in range(MAX_WAITING):
            for each in others:
                queue.put(each)
        goes_on.set()
        queue.settle()
        assert (written, skipped) == ([first, *others], [])
        # It may change, and be written anew.
        queue.put(first)
        queue.settle()
        assert written == [first, *others, first]
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


def test_what_could_not_be_removed_is_tried_again_and_nothing_is_written_before() -> None:
    done, failed, clock = list[str](), list[OSError](), Clock()
    errors = [OSError(errno.EIO, "it fails"), OSError(errno.EIO, "it fails again")]

    def remove(unneeded: Unneeded) -> None:
        if errors:
            raise errors.pop()
        done.extend(unneeded.sessions)

    skipped: list[int] = []
    queue = WriteQueue(lambda one: done.append(one.session), remove, skipped.append, failed.append, clock)
    queue.remove(Unneeded(sessions=["dropped"]))
    for _ in range(2):
        queue.settle()
        queue.put(Chain((), "a", "held anew"))
        clock.now += PAUSE_SECONDS
        queue.remove(Unneeded(sessions=["dropped too"]))
    queue.put(Chain((), "a", "held anew"))
    queue.settle()
    assert done == ["dropped", "dropped too", "dropped too", "held anew"]
    assert len(failed) == 2


def test_what_could_not_be_removed_is_tried_once_more_at_the_end() -> None:
    done, errors = list[str](), [OSError(errno.EIO, "it fails")]

    def remove(unneeded: Unneeded) -> None:
        if errors:
            raise errors.pop()
        done.extend(unneeded.sessions)

    queue = WriteQueue(lambda one: None, remove, lambda count: None, lambda error: None)
    queue.remove(Unneeded(sessions=["dropped"]))
    queue.settle()
    assert not done
    queue.close(PATIENCE)
    assert done == ["dropped"]
