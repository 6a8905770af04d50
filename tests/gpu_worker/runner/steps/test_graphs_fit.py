"""Into which prepared shape a batch goes, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker.runner.steps import graphs as step_graphs
from gpu_worker.runner.steps.graphs import StepGraphs
from gpu_worker.state.batch import Batch, BatchShape, GroupShape
from gpu_worker.state.lane_inputs import NUM_FIELDS

STATE = (object(),)


def shape_of(num_lanes: int, num_positions: int = 1024, policy: str = "") -> BatchShape:
    return BatchShape((GroupShape(policy, False, num_lanes, num_positions),))


def batch_of(shape: BatchShape) -> Batch:
    table = np.zeros((NUM_FIELDS, shape.groups[0].num_lanes), np.int64)
    return Batch(shape, [[]], table, 31)


def graphs_of(*prepared: BatchShape) -> tuple[StepGraphs, list[float]]:
    clock = [0.0]
    graphs = StepGraphs(torch.device("cpu"), lambda: clock[0])
    graphs.fit(batch_of(shape_of(99)), STATE)
    graphs.prepared.update(prepared)
    return graphs, clock


def test_a_batch_goes_into_the_smallest_prepared_shape_that_covers_its_own() -> None:
    wide = [shape_of(8, 4096), shape_of(4, 2048), shape_of(4, 4096), shape_of(2, 9000, "pqcache")]
    graphs, _ = graphs_of(*wide)
    for own, taken in (
        (shape_of(2), wide[1]),
        (shape_of(4, 3000), wide[2]),
        (shape_of(5), wide[0]),
        (shape_of(4, 4096), wide[2]),
        (shape_of(1, 1, "pqcache"), wide[3]),
        # Nothing covers these.
        (shape_of(9), shape_of(9)),
        (shape_of(1, 5000), shape_of(1, 5000)),
    ):
        fitted = graphs.fit(batch_of(own), STATE)
        assert (fitted.shape, fitted.table.shape[1]) == (taken, taken.groups[0].num_lanes)
    # With another state nothing is prepared.
    assert graphs.fit(batch_of(shape_of(2)), (object(),)).shape == shape_of(2)


def test_a_shape_that_comes_often_is_captured_itself_but_not_at_once_with_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_graphs, "MANY_STEPS", 2)
    monkeypatch.setattr(step_graphs, "PAUSE_SECONDS", 1.0)
    wide, first, second = shape_of(8), shape_of(1), shape_of(2)
    graphs, clock = graphs_of(wide)
    for _ in range(2):
        assert graphs.fit(batch_of(first), STATE).shape == graphs.fit(batch_of(second), STATE).shape == wide
    assert graphs.fit(batch_of(first), STATE).shape == first
    # It runs as it is once before it is captured.
    for _ in range(3):
        assert graphs.fit(batch_of(first), STATE).shape == graphs.fit(batch_of(second), STATE).shape == wide
    clock[0] = 1.0
    assert graphs.fit(batch_of(second), STATE).shape == second
    assert graphs.fit(batch_of(first), STATE).shape == wide
