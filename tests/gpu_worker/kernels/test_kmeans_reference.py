"""A K-means round by hand."""

from __future__ import annotations

import torch

from gpu_worker.kernels.kmeans import assign_points, sum_members


def test_a_point_goes_to_the_largest_product_less_the_centroids_own() -> None:
    points = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]])
    centroids = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]]])
    assert assign_points(points, centroids, torch.zeros(1, 3)).tolist() == [[2, 1, 2]]
    # By L2: (1, 0) is nearest to itself, and (1, 1) as near to it as to (0, 1).
    assert assign_points(points, centroids, centroids.square().sum(-1) / 2).tolist() == [[0, 1, 0]]
    assert assign_points(points, centroids, torch.tensor([[0.0, 9.0, float("inf")]])).tolist() == [[0, 0, 0]]


def test_sums_are_in_the_order_of_the_clusters() -> None:
    points = torch.tensor([[[1.0], [2.0], [4.0], [8.0]]])
    order, sizes = torch.tensor([[1, 3, 0, 2]]), torch.tensor([[2, 0, 2]])
    assert sum_members(points, order, sizes).tolist() == [[[10.0], [0.0], [5.0]]]
