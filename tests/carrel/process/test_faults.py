"""Faults on purpose: read from a text, decided by a seed, nothing where there is none."""

from __future__ import annotations

import pytest

from carrel.process.faults import Faults, Kind, Point, read_faults


def struck(text: str, num: int = 400) -> list[Kind | None]:
    faults = read_faults(text)
    return [faults.strike(Point.STORE_CALL) for _ in range(num)]


def test_a_seed_decides_and_its_share_of_times_is_struck() -> None:
    assert struck("store.call:drop:0.25,seed=7") == struck("store.call:drop:0.25,seed=7")
    assert struck("store.call:drop:0.25,seed=7") != struck("store.call:drop:0.25,seed=8")
    assert 60 < struck("store.call:drop:0.25,seed=7").count(Kind.DROP) < 140


def test_points_are_struck_apart() -> None:
    faults, others = read_faults("step:alloc:0.5"), read_faults("step:alloc:0.5")
    for _ in range(10):
        others.strike(Point.PROMPT)
    assert [faults.strike(Point.STEP) for _ in range(50)] == [others.strike(Point.STEP) for _ in range(50)]


def test_a_delay_is_waited_for_and_nothing_strikes_after_the_end() -> None:
    slept: list[float] = []
    faults = Faults(read_faults("transfer:delay:1:2.5").faults, sleep=slept.append)
    assert faults.strike(Point.TRANSFER) is None
    assert slept == [2.5]
    faults.end()
    faults.strike(Point.TRANSFER)
    assert slept == [2.5]
    assert not faults


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("stop", "POINT:KIND:RATE"),
        ("store:drop:1", "'store' is none of store.call, transfer"),
        ("step:drop:1", "'drop' is none of delay, alloc, which step has"),
        ("step:alloc:0", "above 0"),
        ("step:alloc:2", "above 0"),
        ("step:delay:1:601", "at most 600"),
        ("step:alloc:0.6,step:delay:0.6", "more than 1 together"),
    ],
)
def test_what_names_no_fault_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_faults(text)


def test_without_faults_there_are_none() -> None:
    assert not read_faults("")
    assert read_faults("").strike(Point.STEP) is None
