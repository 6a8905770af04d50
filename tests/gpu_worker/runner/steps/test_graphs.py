"""Steps captured as CUDA graphs: when they are captured, and what makes them void."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.runner.steps import graphs as step_graphs
from gpu_worker.runner.steps.graphs import StepGraphs
from gpu_worker.state.batch import Batch, BatchShape, GroupShape
from gpu_worker.state.lane_inputs import NUM_FIELDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")


def batch_of(num_lanes: int, seed: int) -> Batch:
    shape = GroupShape("", False, num_lanes, 64)
    table = np.random.default_rng(seed).integers(0, 100, (NUM_FIELDS, num_lanes))
    return Batch(BatchShape((shape,), (shape,)), [], table)


class Step:
    """Multiplies the table by weights, whose memory is the state. `num_calls`: how often the host was in it."""

    def __init__(self) -> None:
        self.weights = torch.randn(NUM_FIELDS, 1000, dtype=torch.float64, device=DEVICE)
        self.num_calls = 0

    def __call__(self, table: Tensor) -> Tensor:
        self.num_calls += 1
        return (table.double().T @ self.weights).sin()

    def expected(self, batch: Batch) -> Tensor:
        return (torch.from_numpy(batch.table).double().to(DEVICE).T @ self.weights).sin()


def run(
    graphs: StepGraphs, batch: Batch, step: Step, forward: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    return graphs.run(batch, (step.weights,), forward or step)


@torch.inference_mode()
def test_a_shape_is_run_then_captured_then_replayed() -> None:
    graphs, step = StepGraphs(DEVICE), Step()
    for seed in range(6):
        for num_lanes in (3, 8):
            batch = batch_of(num_lanes, 10 * seed + num_lanes)
            assert torch.equal(run(graphs, batch, step), step.expected(batch))
    # Of each shape once as it is, and once under capture.
    assert step.num_calls == 4


@torch.inference_mode()
def test_other_state_voids_what_was_captured() -> None:
    graphs, step = StepGraphs(DEVICE), Step()
    batch = batch_of(4, 1)
    for _ in range(3):
        before = step.num_calls
        results = [run(graphs, batch, step) for _ in range(4)]
        assert step.num_calls == before + 2
        assert torch.equal(results[-1], step.expected(batch))
        step.weights = torch.randn_like(step.weights)


@torch.inference_mode()
def test_the_logits_of_many_graphs_take_the_memory_of_one() -> None:
    graphs, step = StepGraphs(DEVICE), Step()
    places = set()
    for num_lanes in range(1, 9):
        batch = batch_of(num_lanes, num_lanes)
        results = [run(graphs, batch, step) for _ in range(3)]
        assert torch.equal(results[-1], step.expected(batch))
        places.add(results[-1].data_ptr())
    assert len(places) < 8


@torch.inference_mode()
def test_what_is_captured_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 2)
    graphs, step = StepGraphs(DEVICE), Step()
    batches = [batch_of(num_lanes, num_lanes) for num_lanes in (1, 2, 3)]
    for batch in batches * 2:
        run(graphs, batch, step)
    assert step.num_calls == 6
    assert torch.equal(run(graphs, batches[2], step), step.expected(batches[2]))
    assert step.num_calls == 6
    # The first went when the third came.
    assert torch.equal(run(graphs, batches[0], step), step.expected(batches[0]))
    assert step.num_calls == 7


@torch.inference_mode()
def test_garbage_that_holds_a_graph_does_not_void_a_capture() -> None:
    """Python may collect at any allocation, and to end a graph is not permitted while another is captured."""
    graphs, step, spare = StepGraphs(DEVICE), Step(), StepGraphs(DEVICE)
    for _ in range(2):
        run(spare, batch_of(3, 1), step)
    spares, kept = [spare], []
    del spare

    def littering(table: Tensor) -> Tensor:
        # Garbage with a graph, which only a collection finds; and as many containers as bring one about.
        garbage: list[object] = [spares.pop()] if spares else []
        garbage.append(garbage)
        del garbage
        kept.extend([[] for _ in range(200_000)])
        return step(table)

    batch = batch_of(8, 2)
    assert torch.equal(run(graphs, batch, step), step.expected(batch))
    thresholds = gc.get_threshold()
    gc.set_threshold(100, 1, 1)
    try:
        assert torch.equal(run(graphs, batch, step, littering), step.expected(batch))
    finally:
        gc.set_threshold(*thresholds)
    assert graphs.captured
    assert not spares
    assert gc.isenabled()
