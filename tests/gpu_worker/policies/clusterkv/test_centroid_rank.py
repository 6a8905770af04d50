"""Whole-cluster selection, by kernel and reference, against taking clusters one by one."""

from __future__ import annotations

import pytest
import torch
from seat_rig import seated, seats_of
from torch import Tensor

from gpu_worker.policies.clusterkv.centroid_rank import reference

kernel = pytest.importorskip("gpu_worker.policies.clusterkv.centroid_rank.kernel")


def problem(
    device: torch.device,
    group: int,
    num_positions: int,
    num_clusters: int,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    spans: tuple[tuple[int, int], ...] = ((0, 1),),
    num_values: int = 9,
) -> tuple[Tensor, ...]:
    """Inputs of three KV heads in small integers, so that products are exact and ties abound.

    Every third cluster and the last quarter are unused and hold NaN; junk lies outside the candidates.
    """
    batch, generator = len(spans), torch.Generator().manual_seed(num_positions)
    low, high = -(num_values // 2), num_values // 2 + 1
    query = torch.randint(low, high, (batch, 3 * group, head_dim), generator=generator).to(dtype)
    centroids = torch.randint(low, high, (batch, 3, num_clusters, head_dim), generator=generator).float()
    used = torch.tensor([c for c in range(num_clusters) if c == 0 or (c % 3 and 4 * c < 3 * num_clusters)])
    shape = (batch, 3, num_positions)
    labels = used[torch.randint(0, len(used), shape, generator=generator)]
    sizes = torch.zeros(batch, 3, num_clusters, dtype=torch.int64)
    within = torch.full(shape, -99)
    for b, (first, last) in enumerate(spans):
        inside = torch.nn.functional.one_hot(labels[b, :, first:last], num_clusters)
        sizes[b] = inside.sum(dim=1)
        places = (inside.cumsum(dim=1) - 1).gather(-1, labels[b, :, first:last, None]).squeeze(-1)
        within[b, :, first:last] = places
        labels[b, :, :first] = -5
        labels[b, :, last:] = 10**6
    centroids[sizes == 0] = float("nan")
    begin, end = torch.tensor(spans).T
    inputs = (query, centroids, sizes.int(), labels.int(), within.int(), begin, end)
    return tuple(tensor.to(device) for tensor in inputs)


def in_seats(inputs: tuple[Tensor, ...]) -> tuple[Tensor | int, ...]:
    """The arguments that rank `inputs` where they lie in one layer of an index."""
    query, centroids, sizes, labels, within, begin, end = inputs
    seats = seats_of(len(begin), query.device)
    index = (seated(tensor, seats, 10**6) for tensor in (sizes, labels, within))
    return query, seated(centroids, seats, float("nan")), *index, seats, begin, end, labels.shape[2]


def order_of(query: Tensor, centroids: Tensor, labels: Tensor, begin: int, end: int) -> list[int]:
    """Positions of one KV head as whole clusters bring them: the best first, of equals the smaller cluster."""
    members: dict[int, list[int]] = {}
    for position, label in enumerate(labels[begin:end].tolist(), begin):
        members.setdefault(label, []).append(position)
    product = {cluster: float((query.double() @ centroids[cluster].double()).sum()) for cluster in members}
    ranked = sorted(members, key=lambda cluster: (-product[cluster], cluster))
    return [position for cluster in ranked for position in members[cluster]]


def check(inputs: tuple[Tensor, ...]) -> None:
    query, centroids, _, labels, _, begin, end = (tensor.cpu() for tensor in inputs)
    expected = torch.full(labels.shape, -torch.inf)
    for b, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        for head, of_group in enumerate(query[b].chunk(3)):
            order = order_of(of_group, centroids[b, head], labels[b, head], first, last)
            expected[b, head, order] = -torch.arange(len(order)).float()
    for module in kernel, reference:
        places = module.centroid_rank(*in_seats(inputs))
        assert places.dtype == torch.float32
        assert torch.equal(places.cpu(), expected)


@pytest.mark.parametrize(
    ("group", "num_positions", "num_clusters"), [(1, 1, 1), (3, 63, 4), (7, 65, 64), (16, 900, 200)]
)
def test_places_are_those_in_the_ranked_clusters(
    device: torch.device, group: int, num_positions: int, num_clusters: int
) -> None:
    spans = ((0, num_positions), (num_positions // 3, max(num_positions - 5, num_positions // 3 + 1)))
    check(problem(device, group, num_positions, num_clusters, spans=spans))


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(8, torch.float16), (96, torch.bfloat16), (128, torch.float16)]
)
def test_head_sizes_and_queries_of_16_bits(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    check(problem(device, 4, 150, 33, head_dim, dtype, spans=((7, 140),)))


def test_ties_take_the_smaller_cluster_within_a_block_and_across(device: torch.device) -> None:
    # Three values in two dimensions: a handful of products among 300 clusters.
    check(problem(device, 1, 2000, 300, 2, spans=((1, 1999), (0, 2000)), num_values=3))


def test_tokens_of_many_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.policies.clusterkv.centroid_rank.kernel.BLOCK_TOKENS", 32)
    check(problem(device, 2, 301, 20, spans=((0, 301), (40, 300), (96, 128), (300, 301))))


def test_a_sequence_without_candidates_has_no_places(device: torch.device) -> None:
    check(problem(device, 3, 70, 20, spans=((20, 20), (5, 60), (0, 0))))


def test_no_more_positions_are_ranked_than_asked_for(device: torch.device) -> None:
    arguments = in_seats(problem(device, 4, 90, 30, spans=((4, 71), (0, 60))))
    for module in kernel, reference:
        places = module.centroid_rank(*arguments[:-1], 71)
        assert places.shape == (2, 3, 71)
        assert torch.equal(places, module.centroid_rank(*arguments)[..., :71])
    assert kernel.centroid_rank(*arguments[:-1], 0).shape == (2, 3, 0)


def test_labels_and_places_may_have_any_strides(device: torch.device) -> None:
    query, centroids, sizes, labels, within, *rest = in_seats(
        problem(device, 4, 90, 30, spans=((4, 80), (0, 90)))
    )
    deep = torch.full((*within.shape, 2), 77, dtype=torch.int32, device=device)
    deep[..., 1] = within
    assert torch.equal(
        kernel.centroid_rank(query, centroids, sizes, labels, deep[..., 1], *rest),
        reference.centroid_rank(query, centroids, sizes, labels, within, *rest),
    )
