"""A K-means round by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from gpu_worker.kernels.kmeans import assign_points, cluster_sizes, move_centroids, sort_members


def test_a_point_goes_to_the_largest_product_less_the_targets_own() -> None:
    points = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]])
    targets = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]]])
    assert assign_points(points, targets).tolist() == [[2, 1, 2]]
    # By L2: (1, 0) is nearest to itself, and (1, 1) as near to it as to (0, 1).
    assert assign_points(points, targets, targets.square().sum(-1) / 2).tolist() == [[0, 1, 0]]
    assert assign_points(points, targets, torch.tensor([[0.0, 9.0, float("inf")]])).tolist() == [[0, 0, 0]]


def test_means_are_in_the_order_of_the_clusters() -> None:
    points = torch.tensor([[[1.0], [2.0], [4.0], [8.0]], [[16.0], [32.0], [64.0], [0.0]]])
    order, ends = torch.tensor([1, 3, 0, 2, 4, 6, 5, 7]), torch.tensor([[2, 4], [6, 8]])
    assert move_centroids(points, order, ends, is_unit=False).means.tolist() == [
        [[5.0], [2.5]],
        [[40.0], [16.0]],
    ]


def test_targets_are_directions_or_means_of_the_points_type() -> None:
    points = torch.tensor([[[3.0, 4.0], [3.01, 4.01]]], dtype=torch.bfloat16)
    order, ends = torch.tensor([0, 1]), torch.tensor([[1, 2]])
    moved = move_centroids(points, order, ends, is_unit=True)
    assert moved.means.tolist() == points.float().tolist()
    assert moved.targets.dtype == torch.bfloat16
    torch.testing.assert_close(moved.targets[0, 0], torch.tensor([0.6, 0.8], dtype=torch.bfloat16))
    torch.testing.assert_close(moved.half_squares, torch.full((1, 2), 0.5), atol=0.01, rtol=0)
    assert move_centroids(points, order, ends, is_unit=False).targets.tolist() == points.tolist()


def test_empty_clusters_split_the_largest_in_turn() -> None:
    points = torch.tensor([[[1.0, 1.0], [3.0, 3.0], [5.0, 5.0]]])
    # Sizes 0, 1, 0, 2, 0.
    order, ends = torch.tensor([0, 1, 2]), torch.tensor([[0, 1, 1, 3, 3]])
    means = move_centroids(points, order, ends, is_unit=False).means[0]
    longer, shorter = 1 + 1 / 1024, 1 - 1 / 1024
    assert means.tolist() == [
        [4 * longer, 4 * shorter],
        [1, 1],
        [longer, shorter],
        [4, 4],
        [4 * longer, 4 * shorter],
    ]


@pytest.mark.parametrize("num_clusters", [3, 7, 20000])
def test_members_are_in_the_order_of_clusters_and_points(num_clusters: int) -> None:
    labels = torch.tensor([[2, 0, 2, 0, 1], [0, 0, 2, 2, 0]], dtype=torch.int32)
    order, ends = sort_members(labels, num_clusters)
    assert order.tolist() == [1, 3, 4, 0, 2, 5, 6, 9, 7, 8]
    assert cluster_sizes(ends)[:, :3].tolist() == [[2, 1, 2], [3, 0, 2]]
    assert ends[:, -1].tolist() == [5, 10]


@pytest.mark.parametrize("num_points", [1, 5, 3000])
def test_members_of_many_points(num_points: int) -> None:
    labels = torch.randint(0, 50, (3, num_points), generator=torch.Generator().manual_seed(0))
    order, ends = sort_members(labels, 50)
    expected = [
        [place * num_points + int(i) for i in (row == cluster).nonzero()]
        for place, row in enumerate(labels)
        for cluster in range(50)
    ]
    assert order.tolist() == list(itertools.chain(*expected))
    assert ends.flatten().tolist() == list(itertools.accumulate(map(len, expected)))
