"""Kernels of a K-means round against their references, and both by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_rig import amid_nan
from torch import Tensor

from gpu_worker.kernels.kmeans import cluster_sizes, reference, sort_members

kernel = pytest.importorskip("gpu_worker.kernels.kmeans.kernel")


def problem(
    device: torch.device, num_points: int, num_targets: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Points and targets of two problems; points as a view beside NaN."""
    generator = torch.Generator().manual_seed(num_points + width)
    points = torch.randn(2, num_points, width, generator=generator)
    targets = torch.randn(2, num_targets, width, generator=generator)
    return amid_nan(points.to(device, dtype)), targets.to(device, dtype)


def test_a_point_goes_to_the_largest_product_less_the_targets_own(device: torch.device) -> None:
    points = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]], device=device)
    targets = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]]], device=device)
    none_but_first = torch.tensor([[1e6, torch.inf, torch.inf]], device=device)
    for module in kernel, reference:
        assert module.assign_points(points, targets).tolist() == [[2, 1, 2]]
        # By L2: (1, 0) is nearest to itself, and (1, 1) as near to it as to (0, 1).
        assert module.assign_points(points, targets, targets.square().sum(-1) / 2).tolist() == [[0, 1, 0]]
        assert module.assign_points(points, targets, none_but_first).tolist() == [[0, 0, 0]]
        assert module.assign_points(points[:, :0], targets).shape == (1, 0)


@pytest.mark.parametrize(
    ("num_points", "num_targets", "width", "dtype"),
    [
        (1, 1, 5, torch.bfloat16),
        (63, 65, 128, torch.float16),
        (130, 7, 33, torch.float32),
        (65, 200, 96, torch.bfloat16),
        (65, 65, 160, torch.float32),
    ],
)
def test_every_point_has_its_target(
    device: torch.device, num_points: int, num_targets: int, width: int, dtype: torch.dtype
) -> None:
    points, targets = problem(device, num_points, num_targets, width, dtype)
    for less in None, targets.float().square().sum(-1) / 2:
        labels = kernel.assign_points(points, targets, less)
        expected = reference.assign_points(points, targets, less)
        assert labels.dtype == torch.int32
        # The reference's choice, or one that scores as well but for rounding.
        scores = points.double() @ targets.double().mT
        scores = scores if less is None else scores - less.double()[:, None]
        taken, best = (scores.gather(2, one.long()[..., None])[..., 0] for one in (labels, expected))
        torch.testing.assert_close(taken, best, atol=1e-4, rtol=1e-5)
        assert (labels == expected).float().mean() > 0.99


def test_ties_take_the_smallest_also_across_tiles(device: torch.device) -> None:
    # Of whole numbers: equal targets have equal products, in whatever order a library adds.
    points, targets = (one.mul(4).round() for one in problem(device, 70, 200, 16))
    points, targets[:, 130:] = amid_nan(points), targets[:, :70]
    zeros = torch.zeros_like(targets)
    for module in kernel, reference:
        assert int(module.assign_points(points, targets).max()) < 130
        assert not module.assign_points(points, zeros).any()
        assert not module.assign_points(points, zeros, torch.ones_like(zeros[..., 0])).any()


def test_nobody_has_a_target_that_is_ruled_out(device: torch.device) -> None:
    points, targets = problem(device, 90, 150, 32)
    less = torch.full_like(targets[..., 0], torch.inf)
    less[:, 149] = 1e6
    assert (kernel.assign_points(points, targets, less) == 149).all()


def test_means_are_in_the_order_of_the_clusters(device: torch.device) -> None:
    points = torch.tensor([[[1.0], [2.0], [4.0], [8.0]], [[16.0], [32.0], [64.0], [0.0]]], device=device)
    order = torch.tensor([1, 3, 0, 2, 4, 6, 5, 7], device=device)
    ends = torch.tensor([[2, 4], [6, 8]], device=device)
    for module in kernel, reference:
        means = module.move_centroids(points, order, ends, is_unit=False).means
        assert means.tolist() == [[[5.0], [2.5]], [[40.0], [16.0]]]


def test_targets_are_directions_or_means_of_the_points_type(device: torch.device) -> None:
    points = torch.tensor([[[3.0, 4.0], [3.01, 4.01]]], dtype=torch.bfloat16, device=device)
    order, ends = torch.tensor([0, 1], device=device), torch.tensor([[1, 2]], device=device)
    for module in kernel, reference:
        moved = module.move_centroids(points, order, ends, is_unit=True)
        assert moved.means.tolist() == points.float().tolist()
        assert moved.targets.dtype == torch.bfloat16
        torch.testing.assert_close(moved.targets[0, 0].tolist(), [0.6, 0.8], atol=5e-3, rtol=0)
        torch.testing.assert_close(moved.half_squares[0].tolist(), [0.5, 0.5], atol=0.01, rtol=0)
        assert module.move_centroids(points, order, ends, is_unit=False).targets.tolist() == points.tolist()


@pytest.mark.parametrize("is_unit", [False, True])
@pytest.mark.parametrize(
    ("num_points", "num_clusters", "width", "dtype"),
    [(1, 3, 5, torch.float32), (100, 7, 96, torch.bfloat16), (300, 2, 64, torch.float32)],
)
def test_means_are_of_the_members(
    device: torch.device, num_points: int, num_clusters: int, width: int, dtype: torch.dtype, is_unit: bool
) -> None:
    points, _ = problem(device, num_points, 1, width, dtype)
    generator = torch.Generator().manual_seed(num_clusters)
    # The last cluster is always empty.
    labels = torch.randint(0, max(1, num_clusters - 1), (2, num_points), generator=generator).to(device)
    members = sort_members(labels, num_clusters)
    moved, again = (kernel.move_centroids(points, *members, is_unit) for _ in range(2))
    expected = reference.move_centroids(points, *members, is_unit)
    torch.testing.assert_close(moved.means, expected.means, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved.targets, expected.targets, atol=1e-6, rtol=1e-2)
    torch.testing.assert_close(moved.half_squares, moved.targets.float().square().sum(-1) / 2)
    assert torch.equal(moved.means, again.means)
    assert torch.equal(moved.targets, again.targets)


def test_empty_clusters_split_the_largest_in_turn(device: torch.device) -> None:
    """Sizes 2, 0, 5, 0, 5, 0, 0: the empty ones take of 2, 4, 0, then of 2 again."""
    labels = torch.tensor([0, 2, 2, 4, 4, 4, 2, 4, 2, 0, 2, 4], device=device).expand(2, -1)
    points, _ = problem(device, 12, 1, 8)
    for module in kernel, reference:
        means = module.move_centroids(points, *sort_members(labels, 7), is_unit=False).means
        torch.testing.assert_close(means[:, 4], points[:, labels[0] == 4].mean(1))
        for empty, donor in ((1, 2), (3, 4), (5, 0), (6, 2)):
            ratio = means[:, empty] / means[:, donor]
            torch.testing.assert_close(ratio[:, ::2], torch.full_like(ratio[:, ::2], 1 + 1 / 1024))
            torch.testing.assert_close(ratio[:, 1::2], torch.full_like(ratio[:, 1::2], 1 - 1 / 1024))


def test_donors_are_found_among_more_clusters_than_a_tile_has(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "SIZE_TILE", 16)
    labels = torch.cat([torch.arange(1, 70), torch.tensor([68, 5, 68])])[None].to(device)
    members = sort_members(labels, 71)
    points = problem(device, labels.shape[1], 1, 4)[0][:1]
    moved = kernel.move_centroids(points, *members, is_unit=False)
    torch.testing.assert_close(moved.means, reference.move_centroids(points, *members, False).means)


@pytest.mark.parametrize(("num_points", "num_clusters"), [(1, 50), (3000, 50), (5, 12000)])
def test_members_are_in_the_order_of_clusters_and_points(num_points: int, num_clusters: int) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, num_clusters, (3, num_points), generator=generator, dtype=torch.int32)
    order, ends = sort_members(labels, num_clusters)
    expected = [
        [place * num_points + i for i, label in enumerate(row) if label == cluster]
        for place, row in enumerate(labels.tolist())
        for cluster in range(num_clusters)
    ]
    sizes = list(map(len, expected))
    assert order.tolist() == list(itertools.chain(*expected))
    assert ends.flatten().tolist() == list(itertools.accumulate(sizes))
    assert cluster_sizes(ends).flatten().tolist() == sizes
