"""A worker that is started again has the slots that it had, or says that it has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker.startup.earlier_pool import PATIENCE_SECONDS, EarlierPool


class Memory:
    """Bytes that are free, the next each time that somebody has waited."""

    def __init__(self, *free: int) -> None:
        self.free = list(free)
        self.now = 0.0

    def plan(self) -> int:
        return self.free[0]

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if len(self.free) > 1:
            self.free.pop(0)

    def pool(self, path: Path, options: str = "options") -> EarlierPool:
        return EarlierPool(path, options, self.sleep, lambda: self.now)


def test_memory_that_a_killed_worker_gives_back_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    assert Memory(8300).pool(path).settle(Memory(8300).plan) == 8300
    again = Memory(3600, 3600, 8290)
    assert again.pool(path).settle(again.plan) == 8290
    # What more there is may be the others' next.
    third = Memory(9000)
    assert third.pool(path).settle(third.plan) == 8300
    assert third.now == 0


def test_a_smaller_pool_is_told_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "slots"
    first = Memory(8300)
    first.pool(path).settle(first.plan)
    assert not caplog.records
    for number in (1, 2):
        again = Memory(3600)
        assert again.pool(path).settle(again.plan) == 3600
        assert again.now >= PATIENCE_SECONDS
        assert caplog.text.count("3600 bytes, that of the worker before this one had 8300") == number


def test_nothing_is_compared_with_other_options_or_without_a_file(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    first = Memory(8300)
    first.pool(path).settle(first.plan)
    for pool in (Memory().pool(path, "--max-num-seqs 64"), EarlierPool(None, "options")):
        assert pool.settle(lambda: 500) == 500
    path.write_text("[")
    assert Memory().pool(path).settle(lambda: 500) == 500
