"""A pool of threads that are there from the start."""

from __future__ import annotations

import threading

import pytest
from waiting import PATIENCE

from carrel.process.ready_threads import NoThreads, ReadyThreads


def fail(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_work_is_done_where_no_more_threads_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    threads = ReadyThreads(3, "ready", told.append, (1,))
    assert told == [1, 1, 1]
    monkeypatch.setattr(threading.Thread, "start", fail)
    together = threading.Barrier(3)
    for done in [threads.submit(together.wait, PATIENCE) for _ in range(3)]:
        done.result(PATIENCE)
    threads.shutdown()


def test_a_pool_that_is_not_to_be_had_says_what_to_do_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, begun = threading.Thread.start, list[threading.Thread]()

    def start_two(thread: threading.Thread) -> None:
        if len(begun) == 2:
            fail(thread)
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(NoThreads, match=r"3 threads \(few\) .*ulimit -u"):
        ReadyThreads(3, "few")
    for thread in begun:
        thread.join(PATIENCE)
        assert not thread.is_alive()
