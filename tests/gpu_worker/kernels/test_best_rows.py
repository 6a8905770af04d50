"""The search for the best rows, in Triton and by its definition, against sorting tuples."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.best_rows import reference

kernel = pytest.importorskip("gpu_worker.kernels.best_rows.kernel")
CHUNKS = pytest.importorskip("gpu_worker.kernels.best_rows.programs").CHUNKS

TILE = kernel.TILE
SIZES = [1, 65, TILE - 1, TILE + 1, 3 * TILE + 13]


@pytest.fixture(autouse=True, params=["one program a head", "several"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one program with several tiles, where all that a head has could be one."""
    if request.param == "several":
        monkeypatch.setattr(kernel, "MOST_IN_ONE", 0)
    else:
        monkeypatch.setattr(kernel, "TILE_OF_ONE", 1024)


def check(first: Tensor, counts: list[int] | int, device: torch.device, second: Tensor | None = None) -> None:
    """counts: one number is asked of every head as the width."""
    is_even = isinstance(counts, int)
    wanted = [counts] * len(first) if isinstance(counts, int) else counts
    asked, width = None if is_even else torch.tensor(counts, device=device), max(wanted)
    expected = []
    for scores, ties, count in zip(first, first if second is None else second, wanted, strict=True):
        keys = zip(
            scores.tolist(),
            ties.nan_to_num(-math.inf, math.inf, -math.inf).tolist(),
            range(len(ties)),
            strict=True,
        )
        best = sorted((key for key in keys if key[0] > -math.inf), reverse=True)
        rows = sorted(row for _, _, row in best[:count])
        expected.append(rows + [-1] * (width - len(rows)))
    on_device = None if second is None else second.to(device)
    for module in kernel, reference:
        taken = module.best_rows(first.to(device), asked, width, on_device)
        assert taken.tolist() == expected


def scores(num_rows: int, seed: int) -> Tensor:
    """Five heads: distinct; ties; all equal; mostly -inf, with NaN and infinity; zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(5, num_rows, generator=generator)
    first[1] = first[1].round()
    first[2] = -3.0
    first[3, torch.rand(num_rows, generator=generator) < 0.9] = -math.inf
    first[3, ::7] = math.nan
    first[3, 5::11] = math.inf
    first[4] = torch.where(first[4] > 0, 0.0, -0.0)
    return first


@pytest.mark.parametrize("num_rows", SIZES)
def test_best_by_one_score(num_rows: int, device: torch.device) -> None:
    check(scores(num_rows, 1), [min(num_rows, 900), 33, num_rows // 3, num_rows, 5], device)


@pytest.mark.parametrize("num_rows", SIZES)
def test_ties_go_by_the_second_score(num_rows: int, device: torch.device) -> None:
    # The second score is another head's: it has ties of its own, infinities and NaN.
    first = scores(num_rows, 2)
    check(
        first, [num_rows // 2, num_rows // 5, 77, 100, num_rows // 3], device, scores(num_rows, 3).roll(1, 0)
    )


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("has_ties", [False, True])
def test_the_width_is_asked_of_every_head(num_rows: int, has_ties: bool, device: torch.device) -> None:
    """Also where it is all that a head has, or more."""
    first = scores(num_rows, 8)
    for width in (num_rows // 3, num_rows, num_rows + 2):
        check(first, width, device, scores(num_rows, 9).roll(1, 0) if has_ties else None)


def test_more_chunks_than_are_read_at_a_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TILE", 64)
    num_rows = 64 * (CHUNKS.value + 2) + 5
    check(scores(num_rows, 6)[1:2], [num_rows // 2], device)


def test_nothing_asked_for(device: torch.device) -> None:
    check(scores(50, 4), [0, 7, 0, 0, 1], device)
    check(torch.zeros(2, 0), [0, 3], device)
    check(torch.zeros(2, 3), [0, 0], device)


def test_no_more_than_the_width_is_taken(device: torch.device) -> None:
    for module in kernel, reference:
        taken = module.best_rows(torch.arange(5.0, device=device)[None], torch.tensor([4], device=device), 2)
        assert taken.tolist() == [[3, 4]]


def test_scores_that_differ_in_their_last_bits(device: torch.device) -> None:
    bits = torch.randint(
        0, 40, (3, TILE + 500), generator=torch.Generator().manual_seed(5), dtype=torch.int32
    )
    first = (bits + 0x3F800000).view(torch.float32)
    check(first * torch.tensor([1.0, -1.0, 1e-30])[:, None], [700, 700, 1], device, first.flip(1))


def test_scores_of_another_type_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="float64, not float32"):
        kernel.best_rows(torch.zeros(1, 2, device=device).double(), torch.ones(1, device=device).long(), 1)
