"""The waits that make up a step's stall."""

from __future__ import annotations

import pytest

from gpu_worker.store.kv_meter import KVMeter, Stall


def test_a_step_stalls_by_all_that_is_waited_for_within_it() -> None:
    meter = KVMeter()
    with meter.waiting():
        pass
    with meter.step():
        pass
    assert sum(meter.stalls[Stall.ROWS].read().counts) == 0
    for _ in range(2):
        with meter.step():
            for _ in range(3):
                with meter.waiting():
                    pass
    told = meter.stalls[Stall.ROWS].read()
    assert sum(told.counts) == 2
    assert told.sum > 0
    meter.clear()
    assert sum(meter.stalls[Stall.ROWS].read().counts) == 0


def test_a_step_that_fails_counts_nothing_nor_does_it_for_the_next_one() -> None:
    meter = KVMeter()
    with pytest.raises(ValueError, match="gone"), meter.step(), meter.waiting():
        raise ValueError("gone")
    with meter.step():
        pass
    assert sum(meter.stalls[Stall.ROWS].read().counts) == 0
