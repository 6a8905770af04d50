"""Replayed selections: what they overlap, and what a hot cache makes of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.commands.options import Workload
from benchmarks.errors import BenchmarkError
from benchmarks.kernels.resolve import empty_state
from benchmarks.traces import RecordedTrace, WindowTrace, overlap
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
    state = empty_state(workload, 2, slots, CPU)
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


def test_recorded_traces_are_repeated(tmp_path: Path) -> None:
    drawn = steps_of(WindowTrace(2, 2, range(100), 8, 0.5, CPU), 3, 2, 2, 2, 8).int()
    RecordedTrace(drawn, 120).save(tmp_path / "deep" / "trace.npz")
    trace = RecordedTrace.load(tmp_path / "deep" / "trace.npz", CPU)
    assert (trace.num_selected, trace.context) == (8, 120)
    assert trace.hit_rate == pytest.approx(0.5)
    out = torch.empty(3, 4, 3, 8, dtype=torch.int64)
    trace.select(4, out)
    assert torch.equal(out[:2, :2, :2], drawn[1].long())
    assert torch.equal(out[2, 2:, :2], drawn[1, 0].long())
    assert torch.equal(out[:2, :2, 2], drawn[1, :, :, 0].long())


def test_a_trace_without_its_context_ends_with_its_highest_position(tmp_path: Path) -> None:
    positions = np.array([3, 41], np.int32).reshape(1, 1, 1, 1, 2)
    np.savez(tmp_path / "trace.npz", positions=positions)
    assert RecordedTrace.load(tmp_path / "trace.npz", CPU).context == 42


def trace_at(positions: list[int], recorded: int, context: int, candidates: range) -> list[int]:
    trace = RecordedTrace(torch.tensor(positions, dtype=torch.int32).view(1, 1, 1, 1, -1), recorded)
    out = torch.empty(1, 1, 1, len(positions), dtype=torch.int64)
    trace.at(context, candidates).select(0, out)
    return out.flatten().tolist()


def test_a_trace_is_stretched_to_a_longer_context() -> None:
    assert trace_at([4, 5, 50, 99], 100, 250, range(4, 240)) == [10, 12, 125, 239]
    # the same context leaves everything in its place
    assert trace_at([4, 5, 50, 99], 100, 100, range(4, 100)) == [4, 5, 50, 99]


def test_positions_that_meet_or_leave_the_candidates_move_to_free_ones() -> None:
    assert trace_at([10, 11, 12, 13, 90, 91], 100, 25, range(4, 22)) == [4, 5, 6, 7, 20, 21]
    assert trace_at([40, 41, 42, 60], 100, 50, range(4, 50)) == [20, 21, 22, 30]
    assert trace_at([1, 2, 3], 100, 25, range(4, 7)) == [4, 5, 6]
    with pytest.raises(BenchmarkError, match="a trace selects 3 positions out of 2"):
        trace_at([1, 2, 3], 100, 25, range(4, 6))


def test_a_longer_context_keeps_every_repetition() -> None:
    drawn = steps_of(WindowTrace(1, 2, range(4, 200), 30, 0.8, CPU), 5, 1, 1, 2, 30).int()
    trace = RecordedTrace(drawn, 200)
    assert trace.at(333, range(4, 333)).hit_rate == pytest.approx(trace.hit_rate)
    shorter = trace.at(120, range(4, 120))
    assert shorter.positions.diff(dim=-1).min() > 0
    assert shorter.hit_rate > 0.5


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("other", np.zeros((1, 1, 1, 1, 2), np.int32)),
        ("positions", np.zeros((1, 1, 2), np.int32)),
        ("positions", np.array([3, 2], np.int32).reshape(1, 1, 1, 1, 2)),
        ("positions", np.array([-1, 2], np.int32).reshape(1, 1, 1, 1, 2)),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, array: np.ndarray) -> None:
    np.savez(tmp_path / "trace.npz", **{name: array})
    with pytest.raises(BenchmarkError, match="trace"):
        RecordedTrace.load(tmp_path / "trace.npz", CPU)


def test_a_missing_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="holds no selection trace"):
        RecordedTrace.load(tmp_path / "none.npz", CPU)
