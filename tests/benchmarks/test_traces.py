"""Replayed selections: what they overlap, and what a hot cache makes of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.commands.options import Workload
from benchmarks.errors import BenchmarkError
from benchmarks.kernels.base import Setting
from benchmarks.kernels.rows import empty_state
from benchmarks.shapes import SHAPES
from benchmarks.traces import WindowTrace, overlap
from gpu_worker.kernels.resolve.reference import SeatLanes, resolve

CPU = torch.device("cpu")


def steps_of(trace: WindowTrace, num_steps: int, *size: int) -> torch.Tensor:
    out = torch.empty(num_steps, *size, dtype=torch.int64)
    for step in range(num_steps):
        trace.select(step, out[step])
    return out


def test_overlap_counts_what_was_there_before() -> None:
    before, after = torch.tensor([[1, 3, 5, 9]]), torch.tensor([[0, 3, 9, 12]])
    assert overlap(before, after) == 0.5
    assert overlap(before, before) == 1.0


@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.9, 1.0])
def test_each_step_keeps_the_share_of_the_one_before(hit_rate: float) -> None:
    trace = WindowTrace(2, 3, range(4, 504), 40, hit_rate, CPU)
    steps = steps_of(trace, 6, 2, 2, 3, 40)
    assert (steps.diff(dim=-1) > 0).all()
    assert steps.min() >= 4
    assert steps.max() < 504
    for before, after in itertools.pairwise(steps):
        assert overlap(before, after) == pytest.approx(hit_rate)
    # heads, sequences and layers select for themselves
    assert len({tuple(row) for row in steps[0].flatten(0, 2).tolist()}) == 12


def test_a_share_that_is_no_whole_number_holds_on_average() -> None:
    steps = steps_of(WindowTrace(1, 1, range(2000), 7, 0.9, CPU), 201, 1, 1, 1, 7)
    shares = [overlap(before, after) for before, after in itertools.pairwise(steps)]
    assert sum(shares) / len(shares) == pytest.approx(0.9, abs=0.01)


def test_the_same_seed_selects_the_same() -> None:
    one, same, other = (WindowTrace(1, 2, range(300), 20, 0.8, CPU, seed=seed) for seed in (1, 1, 2))
    size = (3, 1, 1, 2, 20)
    assert torch.equal(steps_of(one, *size), steps_of(same, *size))
    assert not torch.equal(steps_of(one, *size), steps_of(other, *size))


def test_a_hot_cache_hits_as_often_as_the_trace_says() -> None:
    selected, slots, workload = 40, 160, Workload(1000, 2)
    trace = WindowTrace(2, 2, range(1000), selected, 0.9, CPU)
    setting = Setting(SHAPES["tiny"], (workload,), selected, CPU, torch.float32)
    state = empty_state(setting, workload, slots)
    seats = torch.arange(2)
    rows = SeatLanes(seats, torch.full((2,), slots), torch.zeros_like(seats), torch.full((2,), 1000))
    shares = []
    for step in range(600):
        out = torch.empty(1, 2, 2, selected, dtype=torch.int64)
        trace.select(step, out)
        _, missed = resolve(state, rows, out[0])
        shares.append(1 - float(missed.float().mean()))
    # the first steps find an empty cache, and the clock is not quite least recently used
    assert sum(shares[100:]) / 500 == pytest.approx(0.9, abs=0.005)


def test_a_working_set_that_is_resident_is_always_hit() -> None:
    steps = steps_of(WindowTrace(1, 1, range(1000), 20, 0.5, CPU, working_set=50), 40, 1, 1, 1, 20)
    assert len(steps.unique()) == 50


def test_more_than_there_is_cannot_be_selected() -> None:
    with pytest.raises(BenchmarkError, match="40 positions"):
        WindowTrace(1, 1, range(30), 40, 0.9, CPU)
