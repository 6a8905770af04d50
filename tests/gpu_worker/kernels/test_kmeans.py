"""The members of clusters, in order. The kernels are in the table of `test_contract`."""

from __future__ import annotations

import itertools

import pytest
import torch

from gpu_worker.kernels.kmeans import cluster_sizes, sort_members


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
