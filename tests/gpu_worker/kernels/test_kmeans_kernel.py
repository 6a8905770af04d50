"""Kernels of a K-means round against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_worker.kernels.kmeans import reference
from gpu_worker.kernels.kmeans.kernel import assign_points, sum_members


def problem(
    device: torch.device,
    num_problems: int,
    num_points: int,
    num_centroids: int,
    width: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Points as a view beside NaN, and centroids."""
    generator = torch.Generator().manual_seed(num_points + width)
    wide = torch.full((num_problems, num_points + 2, width + 3), float("nan"), dtype=dtype)
    wide[:, 1:-1, :width] = torch.randn(num_problems, num_points, width, generator=generator).to(dtype)
    centroids = torch.randn(num_problems, num_centroids, width, generator=generator)
    return wide.to(device)[:, 1:-1, :width], centroids.to(device)


def check_assigned(points: Tensor, centroids: Tensor, less: Tensor) -> Tensor:
    """The kernel's choice is the reference's, or scores as well but for rounding."""
    labels = assign_points(points, centroids, less)
    expected = reference.assign_points(points, centroids, less)
    assert labels.dtype == torch.int64
    scores = points.double() @ centroids.double().mT - less.double()[:, None]
    taken, best = (scores.gather(2, one[..., None])[..., 0] for one in (labels, expected))
    torch.testing.assert_close(taken, best, atol=1e-4, rtol=1e-5)
    assert (labels == expected).float().mean() > 0.99
    return labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [5, 33, 64, 96, 128])
@pytest.mark.parametrize(("num_points", "num_centroids"), [(1, 1), (63, 65), (130, 7), (65, 200)])
def test_every_point_has_its_centroid(
    device: torch.device, num_points: int, num_centroids: int, width: int, dtype: torch.dtype
) -> None:
    points, centroids = problem(device, 2, num_points, num_centroids, width, dtype)
    check_assigned(points, centroids, centroids.square().sum(-1) / 2)
    check_assigned(points, centroids, torch.zeros_like(centroids[..., 0]))


def test_ties_take_the_smallest_also_across_tiles(device: torch.device) -> None:
    points, centroids = problem(device, 3, 70, 200, 16, torch.float32)
    centroids[:, 130:] = centroids[:, :70]
    labels = assign_points(points, centroids, torch.zeros_like(centroids[..., 0]))
    assert int(labels.max()) < 130
    assert not assign_points(points, torch.zeros_like(centroids), torch.ones_like(centroids[..., 0])).any()


def test_nobody_has_a_centroid_that_is_ruled_out(device: torch.device) -> None:
    points, centroids = problem(device, 2, 90, 150, 32, torch.float32)
    less = torch.zeros_like(centroids[..., 0])
    less[:, :149] = float("inf")
    assert bool((assign_points(points, centroids, less) == 149).all())
    less[:] = float("inf")
    less[:, 3] = 1e6
    assert bool((assign_points(points, centroids, less) == 3).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 64, 96])
@pytest.mark.parametrize(("num_points", "num_clusters"), [(1, 3), (100, 7), (31, 40), (300, 2)])
def test_sums_are_of_the_members(
    device: torch.device, num_points: int, num_clusters: int, width: int, dtype: torch.dtype
) -> None:
    points, _ = problem(device, 3, num_points, 1, width, dtype)
    generator = torch.Generator().manual_seed(num_clusters)
    # The last cluster is always empty.
    labels = torch.randint(0, max(1, num_clusters - 1), (3, num_points), generator=generator).to(device)
    order = labels.argsort(dim=1, stable=True)
    sizes = torch.zeros(3, num_clusters, dtype=torch.int64, device=device)
    sizes.scatter_add_(1, labels, torch.ones_like(labels))
    sums = sum_members(points, order, sizes)
    torch.testing.assert_close(sums, reference.sum_members(points, order, sizes), atol=1e-4, rtol=1e-4)
    assert not sums[:, -1].any()
    assert torch.equal(sums, sum_members(points, order, sizes))


def test_no_points_are_no_error(device: torch.device) -> None:
    points, centroids = problem(device, 2, 5, 4, 8, torch.float32)
    assert assign_points(points[:, :0], centroids, torch.zeros_like(centroids[..., 0])).shape == (2, 0)
    sizes = torch.zeros(2, 4, dtype=torch.int64, device=device)
    order = torch.zeros(2, 0, dtype=torch.int64, device=device)
    assert not sum_members(points[:, :0], order, sizes).any()
