"""Whole-cluster selection against taking clusters one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.top_k import top_k
from gpu_worker.policies.clusterkv.centroid_rank import centroid_rank


def places_within(labels: Tensor, begin: int, end: int) -> Tensor:
    """Place of each position in its cluster, by ascending position; junk outside [begin, end)."""
    within = torch.full_like(labels, -99)
    seen: dict[int, int] = {}
    for position in range(begin, end):
        label = int(labels[position])
        within[position] = seen.get(label, 0)
        seen[label] = seen.get(label, 0) + 1
    return within


def order_loop(query: Tensor, centroids: Tensor, labels: Tensor, begin: int, end: int) -> list[int]:
    """Positions in the order of taking. query: [G, d] of one KV head."""
    members: dict[int, list[int]] = {}
    for position in range(begin, end):
        members.setdefault(int(labels[position]), []).append(position)
    product = {cluster: float(query.sum(0) @ centroids[cluster]) for cluster in members}
    ranked = sorted(members, key=lambda cluster: (-product[cluster], cluster))
    return [position for cluster in ranked for position in members[cluster]]


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 7, 20, 39])
def test_the_top_k_are_the_first_k_tokens_of_the_ranked_clusters(group: int, count: int) -> None:
    generator = torch.Generator().manual_seed(group)
    num_clusters, head_dim, spans = 12, 8, [(4, 60), (0, 39)]
    query = torch.randn(2, 2 * group, head_dim, generator=generator)
    centroids = torch.randn(2, 2, num_clusters, head_dim, generator=generator)
    # Clusters 3 and 7 stay empty; their centroids are what an earlier request left.
    ids = torch.tensor([cluster for cluster in range(num_clusters) if cluster not in (3, 7)])
    labels = ids[torch.randint(0, len(ids), (2, 2, 64), generator=generator)].int()
    centroids[:, :, 3], centroids[:, :, 7] = 1e6, float("nan")
    within, sizes = torch.zeros_like(labels), torch.zeros(2, 2, num_clusters, dtype=torch.int32)
    for b, (begin, end) in enumerate(spans):
        for head in range(2):
            within[b, head] = places_within(labels[b, head], begin, end)
            sizes[b, head] = torch.bincount(labels[b, head, begin:end], minlength=num_clusters)
            labels[b, head, :begin] = -5
            labels[b, head, end:] = 10**6
    begins, ends = torch.tensor(spans).T
    # The first sequence lies at seat 1.
    index = (tensor.flip(0) for tensor in (centroids, sizes, labels, within))
    scores = centroid_rank(query, *index, torch.tensor([1, 0]), begins, ends, 64)
    assert scores.dtype == torch.float32
    taken = top_k(scores, torch.tensor([count, count]))
    for b, (begin, end) in enumerate(spans):
        assert torch.isinf(scores[b, :, :begin]).all()
        assert torch.isinf(scores[b, :, end:]).all()
        for head in range(2):
            group_query = query[b, head * group : (head + 1) * group]
            order = order_loop(group_query, centroids[b, head], labels[b, head], begin, end)
            assert scores[b, head, order].tolist() == [-float(place) for place in range(len(order))]
            assert taken[b, head].tolist() == sorted(order[:count])


def test_equal_centroids_are_taken_by_cluster_id() -> None:
    centroids = torch.ones(1, 1, 3, 4)
    labels = torch.tensor([[[2, 1, 0, 1, 2, 0]]], dtype=torch.int32)
    within = places_within(labels[0, 0], 0, 6)[None, None]
    sizes = torch.tensor([[[2, 2, 2]]], dtype=torch.int32)
    scores = centroid_rank(
        torch.ones(1, 2, 4), centroids, sizes, labels, within,
        torch.tensor([0]), torch.tensor([0]), torch.tensor([6]), 6,
    )  # fmt: skip
    assert scores[0, 0].tolist() == [-4.0, -2.0, 0.0, -3.0, -5.0, -1.0]


def test_the_last_cluster_loses_its_highest_positions() -> None:
    centroids = torch.tensor([[[[1.0], [2.0]]]])
    labels = torch.tensor([[[0, 1, 0, 1, 0]]], dtype=torch.int32)
    scores = centroid_rank(
        torch.ones(1, 1, 1),
        centroids,
        torch.tensor([[[3, 2]]], dtype=torch.int32),
        labels,
        places_within(labels[0, 0], 0, 5)[None, None],
        torch.tensor([0]),
        torch.tensor([0]),
        torch.tensor([5]),
        5,
    )
    assert top_k(scores, torch.tensor([3]))[0, 0].tolist() == [0, 1, 3]
    assert top_k(scores, torch.tensor([4]))[0, 0].tolist() == [0, 1, 2, 3]
