from __future__ import annotations

from gateway.exchange import Prefilling
from gateway.progress import INTERVAL_S, PrefillProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_and_the_last_are_told_and_few_between() -> None:
    clock = Clock()
    progress = PrefillProgress([1000], 1, clock)
    told = []
    for computed in range(0, 901, 10):
        told.append(progress.take(0, computed, 100))
        clock.now += INTERVAL_S / 7.5
    accounts = [account for account in told if account is not None]
    assert (told[0], told[-1]) == (Prefilling(1000, 0, 100), Prefilling(1000, 900, 100))
    # Of ninety steps each eighth.
    assert len(accounts) == 2 + 90 // 8
    # The end is told once: the worker repeats it while copies are waited for.
    clock.now += 10
    assert progress.take(0, 900, 100) is None


def test_of_several_choices_of_a_prompt_the_furthest_counts() -> None:
    clock = Clock()
    progress = PrefillProgress([100, 40], 2, clock)

    def take(*event: int) -> Prefilling | None:
        clock.now += 2 * INTERVAL_S
        return progress.take(*event)

    assert take(0, 50, 0) == Prefilling(140, 50, 0)
    assert take(1, 20, 10) is None
    assert take(2, 8, 0) == Prefilling(140, 58, 0)
    assert take(1, 10, 64) == Prefilling(140, 18, 64)
    assert take(3, 40, 0) == Prefilling(140, 50, 64)


def test_it_never_falls() -> None:
    clock = Clock()
    progress = PrefillProgress([100], 1, clock)
    progress.take(0, 60, 0)
    clock.now += 2 * INTERVAL_S
    assert progress.take(0, 5, 0) is None
    assert progress.take(0, 100, 0) == Prefilling(100, 100, 0)
    # Computed again, with what was generated, because it had to give way.
    clock.now += INTERVAL_S
    assert progress.take(0, 120, 0) is None
