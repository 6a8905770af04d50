"""Test which bucket counts a value."""

from __future__ import annotations

import pytest

from carrel.process.histogram import SECONDS, Distribution, Histogram


def test_a_value_counts_below_the_first_bound_that_it_does_not_exceed() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 7.0):
        histogram.observe(value)
    assert histogram.read() == Distribution((1.0, 2.0), (2, 2, 1), 11.5)
    histogram.clear()
    assert histogram.read() == Distribution((1.0, 2.0), (0, 0, 0), 0.0)


def test_a_block_that_raises_counts_nothing() -> None:
    histogram = Histogram()
    with histogram.timed():
        pass
    with pytest.raises(ValueError, match="no"), histogram.timed():
        raise ValueError("no")
    told = histogram.read()
    assert sum(told.counts) == 1
    assert told.sum > 0
    assert told.bounds == tuple(sorted(SECONDS))
