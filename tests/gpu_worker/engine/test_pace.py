"""The time of an iteration's parts, by what was measured."""

from __future__ import annotations

import pytest
from engine_rig import make_model

from gpu_worker.engine.pace import ITL_SECONDS, ITL_STEPS, Pace
from gpu_worker.engine.prompt_work import layer_work
from gpu_worker.records.plans import Measured, WorkKind


def measured(pace: Pace, seconds: float, kind: WorkKind = WorkKind.LONG) -> None:
    """A quantum of 1e9 operations."""
    pace.prefilled([Measured(1e9, kind, seconds)])


def test_nothing_is_foretold_before_it_was_measured() -> None:
    pace = Pace()
    assert pace.seconds(1e9, WorkKind.SHORT) is None
    assert pace.prefill_seconds(is_decoding=True) == pace.iteration_seconds == ITL_SECONDS


def test_work_takes_what_it_took_and_one_slow_time_does_not_count() -> None:
    pace = Pace()
    for seconds in (3.0, 0.01, 0.01):
        measured(pace, seconds)
    assert pace.seconds(5e9, WorkKind.LONG) == pytest.approx(0.05)


def test_short_prompts_are_measured_by_themselves_once_there_were_some() -> None:
    pace = Pace()
    measured(pace, 0.01)
    assert pace.seconds(1e9, WorkKind.SHORT) == pytest.approx(0.01)
    measured(pace, 0.05, WorkKind.SHORT)
    assert pace.seconds(1e9, WorkKind.SHORT) == pytest.approx(0.05)
    assert pace.seconds(1e9, WorkKind.LONG) == pytest.approx(0.01)


def test_scored_prompts_are_foretold_by_scored_ones_only() -> None:
    pace = Pace()
    measured(pace, 0.01)
    assert pace.seconds(1e9, WorkKind.SCORED) is None
    measured(pace, 0.2, WorkKind.SCORED)
    assert pace.seconds(1e9, WorkKind.SCORED) == pytest.approx(0.2)
    assert pace.seconds(1e9, WorkKind.SHORT) == pytest.approx(0.01)


def test_prompts_get_what_steps_leave_and_long_steps_stretch_the_iteration() -> None:
    pace = Pace()
    pace.decoded(0.008)
    assert pace.prefill_seconds(is_decoding=True) == pytest.approx(ITL_SECONDS - 0.008)
    assert pace.prefill_seconds(is_decoding=False) == pytest.approx(ITL_SECONDS)
    for _ in range(20):
        pace.decoded(0.03)
    assert pace.iteration_seconds == pytest.approx(ITL_STEPS * 0.03)
    assert pace.prefill_seconds(is_decoding=True) == pytest.approx((ITL_STEPS - 1) * 0.03)


def test_a_target_that_is_told_holds() -> None:
    pace = Pace(itl_seconds=0.05)
    for _ in range(20):
        pace.decoded(0.06)
    assert pace.iteration_seconds == 0.05
    assert pace.prefill_seconds(is_decoding=True) < 0


def test_the_work_of_a_prompt_is_that_of_its_parts_and_grows_with_what_is_before() -> None:
    config = make_model().config
    whole = layer_work(config, 0, 300)
    assert layer_work(config, 0, 100) + layer_work(config, 100, 300) == pytest.approx(whole)
    assert layer_work(config, 200, 300) > layer_work(config, 0, 100)
