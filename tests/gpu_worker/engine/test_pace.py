"""What an iteration has time for, by what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from engine_rig import make_model

from gpu_worker.device import Mark
from gpu_worker.engine.pace import ITL_SECONDS, ITL_STEPS, Pace, Span
from gpu_worker.runner.prompts.base import WorkKind, layer_work


@dataclass
class Device:
    """Its time, and how far it has come."""

    now: float = 0.0
    done: float = 0.0
    waited: list[float] = field(default_factory=list)

    def mark(self) -> Mark:
        return FakeMark(self, self.now)


class FakeMark(Mark):
    def __init__(self, device: Device, at: float) -> None:
        self.device, self.at = device, at

    @property
    def is_reached(self) -> bool:
        return self.device.done >= self.at

    def wait(self) -> None:
        if not self.is_reached:
            self.device.waited.append(self.at)
            self.device.done = self.at

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, FakeMark)
        return self.at - earlier.at


def prefill(pace: Pace, device: Device, work: float, seconds: float, kind: WorkKind = WorkKind.LONG) -> None:
    begun = pace.mark()
    device.now += seconds
    pace.prefilled([Span(begun, pace.mark(), work, kind)])


def measured(pace: Pace, device: Device, seconds: float, kind: WorkKind = WorkKind.LONG) -> None:
    """A quantum of 1e9 operations, which is done."""
    prefill(pace, device, 1e9, seconds, kind)
    device.done = device.now
    pace.settle()


def step(pace: Pace, device: Device, seconds: float) -> None:
    begun = pace.mark()
    device.now += seconds
    device.done = device.now
    pace.decoded(begun, pace.mark())


def test_nothing_is_foretold_before_it_was_measured() -> None:
    device = Device()
    pace = Pace(device.mark)
    assert pace.seconds(1e9, WorkKind.SHORT) is None
    assert pace.prefill_seconds(is_decoding=True) == pace.iteration_seconds == ITL_SECONDS


def test_work_takes_what_it_took_and_one_slow_time_does_not_count() -> None:
    device = Device()
    pace = Pace(device.mark)
    for seconds in (3.0, 0.01, 0.01):
        prefill(pace, device, 1e9, seconds)
    device.done = device.now
    pace.settle()
    assert pace.seconds(5e9, WorkKind.LONG) == pytest.approx(0.05)


def test_short_prompts_are_measured_by_themselves_once_there_were_some() -> None:
    device = Device()
    pace = Pace(device.mark)
    measured(pace, device, 0.01)
    assert pace.seconds(1e9, WorkKind.SHORT) == pytest.approx(0.01)
    measured(pace, device, 0.05, WorkKind.SHORT)
    assert pace.seconds(1e9, WorkKind.SHORT) == pytest.approx(0.05)
    assert pace.seconds(1e9, WorkKind.LONG) == pytest.approx(0.01)


def test_scored_prompts_are_foretold_by_scored_ones_only() -> None:
    device = Device()
    pace = Pace(device.mark)
    measured(pace, device, 0.01)
    assert pace.seconds(1e9, WorkKind.SCORED) is None
    measured(pace, device, 0.2, WorkKind.SCORED)
    assert pace.seconds(1e9, WorkKind.SCORED) == pytest.approx(0.2)
    assert pace.seconds(1e9, WorkKind.SHORT) == pytest.approx(0.01)


def test_prompts_get_what_steps_leave_and_long_steps_stretch_the_iteration() -> None:
    device = Device()
    pace = Pace(device.mark)
    step(pace, device, 0.008)
    assert pace.prefill_seconds(is_decoding=True) == pytest.approx(ITL_SECONDS - 0.008)
    assert pace.prefill_seconds(is_decoding=False) == pytest.approx(ITL_SECONDS)
    for _ in range(20):
        step(pace, device, 0.03)
    assert pace.iteration_seconds == pytest.approx(ITL_STEPS * 0.03)
    assert pace.prefill_seconds(is_decoding=True) == pytest.approx((ITL_STEPS - 1) * 0.03)


def test_a_target_that_is_told_holds() -> None:
    device = Device()
    pace = Pace(device.mark, itl_seconds=0.05)
    for _ in range(20):
        step(pace, device, 0.06)
    assert pace.iteration_seconds == 0.05
    assert pace.prefill_seconds(is_decoding=True) < 0


def test_the_device_has_at_most_one_iteration_of_prompts_before_it() -> None:
    device = Device()
    pace = Pace(device.mark)
    for _ in range(4):
        prefill(pace, device, 1e9, 0.02)
        pace.settle()
    assert device.waited == pytest.approx([0.02, 0.04, 0.06])


def test_the_work_of_a_prompt_is_that_of_its_parts_and_grows_with_what_is_before() -> None:
    config = make_model().config
    whole = layer_work(config, 0, 300)
    assert layer_work(config, 0, 100) + layer_work(config, 100, 300) == pytest.approx(whole)
    assert layer_work(config, 200, 300) > layer_work(config, 0, 100)
