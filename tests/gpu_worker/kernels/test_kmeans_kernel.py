"""Kernels of a K-means round against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_worker.kernels.kmeans import reference
from gpu_worker.kernels.kmeans.kernel import assign_points, move_centroids


def problem(
    device: torch.device,
    num_problems: int,
    num_points: int,
    num_targets: int,
    width: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Points as a view beside NaN, and targets before NaN."""
    generator = torch.Generator().manual_seed(num_points + width)
    wide = torch.full((num_problems, num_points + 2, width + 3), float("nan"), dtype=dtype)
    wide[:, 1:-1, :width] = torch.randn(num_problems, num_points, width, generator=generator).to(dtype)
    targets = torch.full((num_problems + 1, num_targets, width), float("nan"), dtype=dtype)
    targets[:-1] = torch.randn(num_problems, num_targets, width, generator=generator).to(dtype)
    return wide.to(device)[:, 1:-1, :width], targets.to(device)[:-1]


def half_squares(targets: Tensor) -> Tensor:
    return targets.float().square().sum(-1) / 2


def check_assigned(points: Tensor, targets: Tensor, less: Tensor | None) -> Tensor:
    """The kernel's choice is the reference's, or scores as well but for rounding."""
    labels = assign_points(points, targets, less)
    expected = reference.assign_points(points, targets, less)
    assert labels.dtype == torch.int32
    scores = points.double() @ targets.double().mT
    scores = scores if less is None else scores - less.double()[:, None]
    taken, best = (scores.gather(2, one.long()[..., None])[..., 0] for one in (labels, expected))
    torch.testing.assert_close(taken, best, atol=1e-4, rtol=1e-5)
    assert (labels == expected).float().mean() > 0.99
    return labels


@pytest.mark.parametrize(
    ("width", "dtype"), [(5, torch.float32), (33, torch.float16), (96, torch.float32), (128, torch.bfloat16)]
)
@pytest.mark.parametrize(("num_points", "num_targets"), [(1, 1), (63, 65), (130, 7), (65, 200)])
def test_every_point_has_its_target(
    device: torch.device, num_points: int, num_targets: int, width: int, dtype: torch.dtype
) -> None:
    points, targets = problem(device, 2, num_points, num_targets, width, dtype)
    check_assigned(points, targets, half_squares(targets))
    check_assigned(points, targets, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_take_the_smallest_also_across_tiles(device: torch.device, dtype: torch.dtype) -> None:
    points, targets = problem(device, 3, 70, 200, 16, dtype)
    targets[:, 130:] = targets[:, :70]
    assert int(assign_points(points, targets).max()) < 130
    assert not assign_points(points, torch.zeros_like(targets)).any()
    assert not assign_points(
        points, torch.zeros_like(targets), torch.ones_like(targets[..., 0].float())
    ).any()


def test_nobody_has_a_target_that_is_ruled_out(device: torch.device) -> None:
    points, targets = problem(device, 2, 90, 150, 32, torch.float32)
    less = torch.zeros_like(targets[..., 0])
    less[:, :149] = float("inf")
    assert bool((assign_points(points, targets, less) == 149).all())
    less[:] = float("inf")
    less[:, 3] = 1e6
    assert bool((assign_points(points, targets, less) == 3).all())


def sorted_members(labels: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Order and ends of labels [P, n], by plain counting."""
    names = (labels + num_clusters * torch.arange(len(labels), device=labels.device)[:, None]).flatten()
    ends = torch.bincount(names, minlength=len(labels) * num_clusters).cumsum(0)
    return names.argsort(stable=True), ends.view(-1, num_clusters)


def check_moved(points: Tensor, labels: Tensor, num_clusters: int, is_unit: bool) -> reference.Centroids:
    order, ends = sorted_members(labels, num_clusters)
    moved = move_centroids(points, order, ends, is_unit)
    expected = reference.move_centroids(points, order, ends, is_unit)
    assert moved.targets.dtype == points.dtype
    torch.testing.assert_close(moved.means, expected.means, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved.targets, expected.targets, atol=1e-6, rtol=1e-2)
    torch.testing.assert_close(moved.half_squares, half_squares(moved.targets))
    again = move_centroids(points, order, ends, is_unit)
    assert torch.equal(moved.means, again.means)
    assert torch.equal(moved.targets, again.targets)
    return moved


@pytest.mark.parametrize("is_unit", [False, True])
@pytest.mark.parametrize(("width", "dtype"), [(5, torch.float32), (96, torch.bfloat16)])
@pytest.mark.parametrize(("num_points", "num_clusters"), [(1, 3), (100, 7), (300, 2)])
def test_means_are_of_the_members(
    device: torch.device, num_points: int, num_clusters: int, width: int, dtype: torch.dtype, is_unit: bool
) -> None:
    points, _ = problem(device, 3, num_points, 1, width, dtype)
    generator = torch.Generator().manual_seed(num_clusters)
    # The last cluster is always empty.
    labels = torch.randint(0, max(1, num_clusters - 1), (3, num_points), generator=generator).to(device)
    moved = check_moved(points, labels, num_clusters, is_unit)
    if is_unit:
        assert (moved.targets.float().norm(dim=-1) - 1).abs().max() < 0.01


def test_empty_clusters_split_the_largest(device: torch.device) -> None:
    """Sizes 2, 0, 5, 0, 5, 0, 0: the empty ones take of 2, 4, 0, then of 2 again."""
    labels = torch.tensor([0, 2, 2, 4, 4, 4, 2, 4, 2, 0, 2, 4], device=device).expand(2, -1)
    points, _ = problem(device, 2, 12, 1, 8, torch.float32)
    means = check_moved(points, labels, 7, is_unit=False).means
    for empty, donor in ((1, 2), (3, 4), (5, 0), (6, 2)):
        ratio = means[:, empty] / means[:, donor]
        torch.testing.assert_close(ratio[:, ::2], torch.full_like(ratio[:, ::2], 1 + 1 / 1024))
        torch.testing.assert_close(ratio[:, 1::2], torch.full_like(ratio[:, 1::2], 1 - 1 / 1024))


def test_donors_are_found_among_more_clusters_than_a_tile_has(device: torch.device) -> None:
    """In the interpreter few may be empty, for a program that looks for a donor is slow there, and any is."""
    labels = torch.cat([torch.arange(1, 1030), torch.tensor([1028, 5, 1028])])[None].to(device)
    points, _ = problem(device, 1, labels.shape[1], 1, 4, torch.float32)
    order, ends = sorted_members(labels, 1031)
    moved = move_centroids(points, order, ends, is_unit=False)
    torch.testing.assert_close(moved.means, reference.move_centroids(points, order, ends, False).means)


def test_no_points_are_no_error(device: torch.device) -> None:
    points, targets = problem(device, 2, 5, 4, 8, torch.float32)
    assert assign_points(points[:, :0], targets).shape == (2, 0)
