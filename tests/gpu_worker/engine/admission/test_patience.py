"""How long requests wait for a silent store."""

from __future__ import annotations

from offload_rig import make_sequence

from carrel.process.histogram import Histogram
from gpu_worker.engine.admission.patience import Patience


def test_each_waits_its_time_and_nobody_longer_than_the_store_was_silent() -> None:
    now = silent = 0.0
    patience = Patience(10.0, lambda: silent, Histogram(), lambda: now)
    first, second = make_sequence("first", 0, 9), make_sequence("second", 1, 9)
    assert not patience.held
    silent = 1.0
    patience.wait(first)
    now = 6.0
    patience.wait(second)
    # The first time counts.
    patience.wait(first)
    assert set(patience.held) == {first, second}
    assert patience.over() == []
    # It answers others, but never this one.
    silent, now = 0.0, 10.0
    assert not patience.held
    assert patience.over() == [first]
    patience.end(first)
    patience.end(first)
    assert patience.over() == []
    # It was silent before the second came.
    silent = 10.0
    assert patience.over() == [second]


def test_who_needs_the_store_waits_as_long_as_it_is_silent() -> None:
    now, silent = 0.0, 1.0
    patience = Patience(10.0, lambda: silent, Histogram(), lambda: now)
    one = make_sequence("one", 0, 9)
    patience.note_all([one])
    assert list(patience.held) == [one]
    silent = 0.0
    patience.note_all([one])
    now, silent = 20.0, 1.0
    assert patience.over() == []
    patience.note(waiting=[one], others=[])
    now = 30.0
    assert patience.over() == [one]
    patience.note(waiting=[], others=[one])
    assert patience.over() == []
