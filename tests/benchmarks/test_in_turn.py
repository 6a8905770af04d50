"""Blocks of steps by turns."""

from __future__ import annotations

import pytest

from benchmarks import in_turn


def test_kinds_take_turns_and_are_compared_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    now, cost = 0.0, 0.0
    order: list[str] = []

    class Engine:
        def step(self) -> bool:
            nonlocal now
            now += cost
            return True

    def prepare(kind: str, milliseconds: list[float]) -> None:
        nonlocal cost
        order.append(kind)
        cost = milliseconds.pop(0) / 1e3

    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(f"benchmarks.in_turn.time.{name}", lambda: now)
    # The first round warms up; then the machine is twice as slow for a while.
    without, with_it = [900.0, 10.0, 20.0, 10.0], [5.0, 11.0, 22.0, 11.0]
    kinds = {"without": lambda: prepare("without", without), "with": lambda: prepare("with", with_it)}
    found = in_turn.in_turn(Engine(), kinds, num_blocks=3, num_steps=7)
    assert order == ["without", "with"] * 4
    assert found["without"].ms.median == pytest.approx(10)
    assert found["with"].cpu_ms.median == pytest.approx(11)
    assert found["with"].ratio.low == pytest.approx(1.1)
    assert found["with"].ratio.high == pytest.approx(1.1)
    assert found["without"].cpu_ratio.n == 3
