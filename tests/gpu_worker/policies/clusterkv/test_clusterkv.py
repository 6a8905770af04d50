"""ClusterKV: clusters of the prompt and of later windows are recalled whole."""

from __future__ import annotations

import pytest
import torch
from policy_index import SHAPE, kmeans_segment, poison, select
from torch import Tensor

from gpu_worker.policies.clusterkv.policy import ClusterIndex, ClusterKV
from gpu_worker.policies.recall import IndexJob, TrainedSegment
from kv_store.client import KMeansParams

POLICY = ClusterKV(num_sink=4, tokens_per_cluster=10, window_size=40)
HEADS, DIM = SHAPE.num_kv_heads, SHAPE.head_dim


def job(begin: int, end: int, num_before: int = 0) -> IndexJob:
    return IndexJob(begin, end, KMeansParams(1), num_before=num_before)


def new_index() -> ClusterIndex:
    index = POLICY.allocate(SHAPE)
    poison(index)
    return index


def random_labels(num_tokens: int, num_clusters: int, seed: int) -> Tensor:
    """Labels of which the last cluster and one in the middle stay empty."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.tensor([cluster for cluster in range(num_clusters - 1) if cluster != 2])
    return used[torch.randint(0, len(used), (HEADS, num_tokens), generator=generator)]


def random_centroids(num_clusters: int, seed: int) -> Tensor:
    return torch.randn(HEADS, num_clusters, DIM, generator=torch.Generator().manual_seed(seed))


def test_places_and_sizes_are_those_of_the_labels() -> None:
    index, labels = new_index(), random_labels(60, 7, 0)
    POLICY.load(index, TrainedSegment(1, 1, job(4, 64), kmeans_segment(random_centroids(7, 0), labels)))
    for head in range(HEADS):
        assert index.labels[1, 1, head, 4:64].tolist() == labels[head].tolist()
        sizes = index.sizes[1, 1, head].tolist()
        assert sizes == [labels[head].tolist().count(cluster) for cluster in range(len(sizes))]
        for token in range(60):
            before = labels[head, :token].tolist().count(int(labels[head, token]))
            assert int(index.within[1, 1, head, 4 + token]) == before


def test_later_segments_get_clusters_of_their_own() -> None:
    index, seat = new_index(), 2
    segments = [(4, 64, 7), (64, 104, 4), (104, 144, 4)]
    all_labels = {}
    for layer in range(2):
        for place, (begin, end, clusters) in enumerate(segments):
            own = job(begin, end, sum(before for *_, before in segments[:place]))
            labels = random_labels(end - begin, clusters, begin + layer)
            centroids = random_centroids(clusters, begin)
            POLICY.load(index, TrainedSegment(seat, layer, own, kmeans_segment(centroids, labels)))
            all_labels[layer, begin] = labels, centroids
    for layer in range(2):
        for head in range(HEADS):
            seen: set[int] = set()
            for begin, end, _ in segments:
                labels, centroids = all_labels[layer, begin]
                ids = index.labels[seat, layer, head, begin:end].tolist()
                # Equal labels, equal ids; the ids are new; their centroids are the segment's.
                assert len(set(zip(ids, labels[head].tolist(), strict=True))) == len(set(ids))
                assert not seen & set(ids)
                seen |= set(ids)
                for cluster, label in zip(ids, labels[head].tolist(), strict=True):
                    assert torch.equal(index.centroids[seat, layer, head, cluster], centroids[head, label])
                    assert index.sizes[seat, layer, head, cluster] == ids.count(cluster)
            assert int(index.sizes[seat, layer, head].sum()) == 140


def test_the_seat_has_room_for_the_longest_sequence() -> None:
    index = new_index()
    num_prompt = 44
    segments = [(4, num_prompt)]
    while segments[-1][1] + POLICY.window_size <= SHAPE.max_model_len:
        segments.append((segments[-1][1], segments[-1][1] + POLICY.window_size))
    plan = POLICY.plan(num_prompt, 10)
    for begin, end in segments:
        ask = POLICY.leaving_job if begin >= num_prompt else POLICY.prompt_job
        own = ask(plan, begin, end)
        clusters = own.params.num_clusters
        labels = (torch.arange(end - begin) % clusters).expand(HEADS, -1)
        POLICY.load(index, TrainedSegment(0, 0, own, kmeans_segment(random_centroids(clusters, 0), labels)))
    assert int(index.sizes[0, 0, 0].sum()) == segments[-1][1] - 4


def test_whole_clusters_are_taken_best_first_and_the_last_is_trimmed() -> None:
    index = new_index()
    axes = torch.eye(DIM)
    # Head 0: clusters along axes 0, 1, 2; head 1: the same in another order.
    centroids = torch.stack([axes[[0, 1, 2]], axes[[2, 0, 1]]])
    labels = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1, 2, 0], [2, 2, 2, 0, 0, 0, 1, 1, 1, 1]])
    POLICY.load(index, TrainedSegment(0, 0, job(4, 14), kmeans_segment(centroids, labels)))
    query = torch.zeros(1, 4, DIM)
    # The group's sum ranks axis 1 before axis 0 before axis 2, though one head alone prefers axis 0.
    query[0, :, :3] = torch.tensor([[2.0, 1.0, 0.0], [0.0, 5.0, 0.0]]).repeat(2, 1)
    taken = select(POLICY, index, query, {0: (4, 14)}, layer=0, k=5)
    assert taken == [[[4, 5, 7, 8, 11], [4, 5, 6, 10, 11]]]


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_the_metric_is_that_of_the_job(metric: str) -> None:
    policy = ClusterKV(metric=metric)
    plan = policy.plan(2000, 400)
    for begin, end in [(16, 2000), (2000, 2320)]:
        assert policy.prompt_job(plan, begin, end).params.metric == metric
