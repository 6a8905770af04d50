"""How long requests wait for a silent store."""

from __future__ import annotations

from request_rig import make_request

from gpu_worker.engine.patience import Patience


def test_each_waits_its_time_and_nobody_longer_than_the_store_was_silent() -> None:
    now = silent = 0.0
    patience = Patience(10.0, lambda: now)
    first, second = make_request("first"), make_request("second")
    assert not patience.held(silent)
    silent = 1.0
    patience.wait(first)
    now = 6.0
    patience.wait(second)
    # The first time counts.
    patience.wait(first)
    assert set(patience.held(silent)) == {first, second}
    assert patience.over(silent) == []
    # It answers others, but never this one.
    silent, now = 0.0, 10.0
    assert not patience.held(silent)
    assert patience.over(silent) == [first]
    patience.end(first)
    patience.end(first)
    assert patience.over(silent) == []
    # It was silent before the second came.
    silent = 10.0
    assert patience.over(silent) == [second]


def test_who_needs_the_store_waits_as_long_as_it_is_silent() -> None:
    now, silent = 0.0, 1.0
    patience = Patience(10.0, lambda: now)
    one = make_request("one")
    patience.note_all([one], silent)
    assert list(patience.held(silent)) == [one]
    silent = 0.0
    patience.note_all([one], silent)
    now, silent = 20.0, 1.0
    assert patience.over(silent) == []
    patience.note(waiting=[one], others=[])
    now = 30.0
    assert patience.over(silent) == [one]
    patience.note(waiting=[], others=[one])
    assert patience.over(silent) == []
