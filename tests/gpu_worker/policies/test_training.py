"""Indexes trained on the device are as good as FAISS's on the same rows, and repeatable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.kmeans import lloyd
from gpu_worker.policies.clusterkv.policy import train_kmeans
from gpu_worker.policies.pqcache.policy import train_pq
from gpu_worker.policies.pqcache.pq_score import augment
from kv_store.client import KMeansParams, PQParams


def train_index(keys: Tensor, params: PQParams | KMeansParams, seed: int) -> Mapping[str, Tensor]:
    train: Any = train_pq if isinstance(params, PQParams) else train_kmeans
    return train(keys, params, seed)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


def clustered_keys(num_tokens: int, head_dim: int, num_groups: int, device: torch.device) -> Tensor:
    """Keys [2, T, d] about some centres, of unequal length."""
    generator = torch.Generator().manual_seed(num_tokens)
    centres = torch.randn(2, num_groups, head_dim, generator=generator)
    group = torch.randint(0, num_groups, (2, num_tokens), generator=generator)
    keys = centres.gather(1, group[..., None].expand(-1, -1, head_dim))
    keys = keys + 0.3 * torch.randn(keys.shape, generator=generator)
    lengths = 0.5 + torch.rand(2, num_tokens, 1, generator=generator)
    return (keys * lengths).to(device)


def pq_error(keys: Tensor, codebooks: Tensor, codes: Tensor) -> float:
    """Squared distance of keys to what their codes stand for."""
    num_parts, width = codebooks.shape[1], codebooks.shape[3]
    error = 0.0
    for part in range(num_parts):
        index = codes[..., part].long()[..., None].expand(-1, -1, width)
        decoded = codebooks[:, part].gather(1, index)
        error += float((keys[..., part * width : (part + 1) * width] - decoded).square().sum())
    return error


def test_pq_codes_are_nearest_and_the_error_is_faiss_like(device: torch.device) -> None:
    pytest.importorskip("faiss")
    from kv_store.index import ArrayKeys, FitOptions
    from kv_store.index.pq import PQIndex

    keys, params = clustered_keys(3000, 32, 40, device), PQParams(2, 5, 12)
    arrays = train_index(keys, params, seed=3)
    codebooks, codes = arrays["codebooks"], arrays["codes"]
    assert (codebooks.shape, codes.shape) == ((2, 2, 32, 16), (2, 3000, 2))
    assert (codebooks.dtype, codes.dtype) == (torch.float32, torch.uint8)
    for head in range(2):
        for part in range(2):
            distances = torch.cdist(keys[head, :, 16 * part : 16 * part + 16], codebooks[head, part])
            chosen = distances.gather(1, codes[head, :, part].long()[:, None])[:, 0]
            torch.testing.assert_close(chosen, distances.amin(dim=1), atol=2e-3, rtol=1e-3)
    of_faiss = [
        PQIndex(params).fit_head(ArrayKeys(k.cpu().numpy()), FitOptions(12, 3, 256)).arrays for k in keys
    ]
    books = torch.from_numpy(np.stack([arrays[0] for arrays in of_faiss]))
    their_codes = torch.from_numpy(np.stack([arrays[1] for arrays in of_faiss]))
    assert pq_error(keys.cpu(), codebooks.cpu(), codes.cpu()) < 1.1 * pq_error(keys.cpu(), books, their_codes)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_clusters_are_as_tight_as_faiss_ones(metric: str, device: torch.device) -> None:
    pytest.importorskip("faiss")
    from kv_store.index import ArrayKeys, FitOptions
    from kv_store.index.kmeans import KMeansIndex

    keys, params = clustered_keys(2000, 24, 30, device), KMeansParams(25, metric, 15)
    arrays = train_index(keys, params, seed=1)
    centroids, labels = arrays["centroids"].cpu(), arrays["labels"].cpu().long()
    assert (centroids.shape, labels.shape) == ((2, 25, 24), (2, 2000))

    def looseness(centroids: Tensor, labels: Tensor, keys: Tensor) -> float:
        own = centroids.gather(1, labels[..., None].expand_as(keys))
        if metric == "cosine":
            return float((1 - torch.cosine_similarity(keys, own, dim=-1)).sum())
        return float((keys - own).square().sum())

    of_faiss = [
        KMeansIndex(params).fit_head(ArrayKeys(k.cpu().numpy()), FitOptions(15, 1, 256)).arrays for k in keys
    ]
    theirs = torch.from_numpy(np.stack([arrays[0] for arrays in of_faiss]))
    their_labels = torch.from_numpy(np.stack([arrays[1] for arrays in of_faiss])).long()
    mine = looseness(centroids, labels, keys.cpu())
    assert mine < 1.15 * looseness(theirs, their_labels, keys.cpu())
    if metric == "cosine":
        # Every label is the best of the clusters that have members.
        used = [labels[head].unique() for head in range(2)]
        for head in range(2):
            unit = torch.nn.functional.normalize(centroids[head, used[head]], dim=-1)
            best = used[head][(keys[head].cpu() @ unit.T).argmax(dim=1)]
            assert (best == labels[head]).float().mean() > 0.99


def test_pq_by_inner_product_is_pq_of_augmented_keys(device: torch.device) -> None:
    keys = clustered_keys(1500, 16, 20, device)
    arrays = train_index(keys, PQParams(2, 4, 8, "ip"), seed=3)
    norms = torch.stack([part.square().sum(-1).amax(1) for part in keys.split(8, dim=-1)], dim=1)
    torch.testing.assert_close(arrays["max_square_norms"], norms)
    augmented = augment(keys, norms[:, None])
    as_l2 = train_index(augmented, PQParams(2, 4, 8), seed=3)
    assert arrays["codebooks"].shape == (2, 2, 16, 9)
    torch.testing.assert_close(arrays["codebooks"], as_l2["codebooks"])
    assert torch.equal(arrays["codes"], as_l2["codes"])


def test_by_inner_product_labels_are_of_the_largest_and_centroids_are_means(device: torch.device) -> None:
    pytest.importorskip("faiss")
    from kv_store.index import ArrayKeys, FitOptions
    from kv_store.index.kmeans import KMeansIndex

    keys, params = clustered_keys(2000, 24, 30, device), KMeansParams(25, "ip", 15)
    arrays = train_index(keys, params, seed=1)
    labels, keys = arrays["labels"].cpu().long(), keys.cpu()
    products = keys @ arrays["centroids"].cpu().mT
    torch.testing.assert_close(products.gather(2, labels[..., None])[..., 0], products.amax(-1))
    of_faiss = [
        KMeansIndex(params).fit_head(ArrayKeys(k.numpy()), FitOptions(15, 1, 256)).arrays for k in keys
    ]
    theirs = torch.from_numpy(np.stack([arrays[0] for arrays in of_faiss]))
    assert float(products.amax(-1).sum()) > 0.9 * float((keys @ theirs.mT).amax(-1).sum())
    # Unit centroids, or those of unit keys, would be no longer than 1.
    assert arrays["centroids"].norm(dim=-1).amax() > 2


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_an_empty_cluster_splits_a_large_one(metric: str) -> None:
    """Four directions, many keys of each: whichever keys come first, in the end each direction has a cluster."""
    directions = torch.tensor([[8.0, 1.0, 0.0], [-1.0, 8.0, 1.0], [0.0, -8.0, 1.0], [1.0, 0.0, -8.0]])
    points = directions.repeat(30, 1)[None]
    points = points if metric != "cosine" else torch.nn.functional.normalize(points, dim=-1)
    for seed in range(10):
        centroids, _ = lloyd.fit(points, 4, 20, seed, metric)
        labels = lloyd.assign(points, centroids, metric)
        assert labels[0, :4].unique().tolist() == [0, 1, 2, 3], seed


@pytest.mark.parametrize("num_points", [1, 2, 3, 80, 997, 32752])
def test_chosen_places_are_different_and_spread(num_points: int) -> None:
    for seed in (0, 5, 2**40):
        places = lloyd.spread(num_points, num_points, seed, torch.device("cpu"))
        assert places.sort().values.tolist() == list(range(num_points))
    if num_points > 900:
        gaps = places[:90].sort().values.diff()
        assert int(gaps.max()) < 4 * num_points / 90


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_keys_of_16_bits_are_clustered_as_well(metric: str, device: torch.device) -> None:
    keys, params = clustered_keys(2000, 24, 30, device), KMeansParams(25, metric, 15)
    error = []
    for points in (keys, keys.bfloat16()):
        arrays = train_index(points, params, seed=1)
        own = arrays["centroids"].gather(1, arrays["labels"].long()[..., None].expand_as(keys))
        assert arrays["centroids"].dtype == torch.float32
        error.append(float((keys - own).square().sum()))
    assert error[1] < 1.05 * error[0]


ALL_METRICS = [PQParams(2, 4), PQParams(2, 4, 0, "ip"), *(KMeansParams(9, m) for m in ("cosine", "l2", "ip"))]


@pytest.mark.parametrize("params", ALL_METRICS)
def test_two_runs_agree(params: PQParams | KMeansParams, device: torch.device) -> None:
    keys = clustered_keys(500, 16, 20, device)
    one, other = (train_index(keys, params, seed=5) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("params", [PQParams(2, 4), KMeansParams(16)])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17])
def test_few_tokens(params: PQParams | KMeansParams, num_tokens: int, device: torch.device) -> None:
    keys = clustered_keys(num_tokens, 16, 4, device)
    arrays = train_index(keys, params, seed=0)
    if isinstance(params, PQParams):
        assert pq_error(keys, arrays["codebooks"], arrays["codes"]) < 0.2 * float(keys.square().sum())
    else:
        own = arrays["centroids"].gather(1, arrays["labels"].long()[..., None].expand_as(keys))
        assert torch.cosine_similarity(keys, own, dim=-1).min() > 0.5


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_few_tokens_have_their_own_codes_where_rounding_would_not_tell(
    metric: str, device: torch.device
) -> None:
    # Squares of such lengths have no place for the differences.
    keys = 1000 + clustered_keys(12, 64, 12, device) / 100
    codes = train_index(keys, PQParams(2, 4, 0, metric), seed=0)["codes"]
    assert codes.tolist() == [[[token, token] for token in range(12)]] * 2


def test_equal_keys_leave_clusters_without_members(device: torch.device) -> None:
    keys = torch.ones(1, 300, 8, device=device)
    arrays = train_index(keys, KMeansParams(7), seed=0)
    assert torch.isfinite(arrays["centroids"]).all()
    own = arrays["centroids"].gather(1, arrays["labels"].long()[..., None].expand_as(keys))
    torch.testing.assert_close(own, keys)


def test_more_points_a_centroid_fit_the_keys_better() -> None:
    keys, params = clustered_keys(3000, 32, 40, torch.device("cpu")), PQParams(2, 5, 12)
    few, many = (train_pq(keys, params, 3, points) for points in (4, 64))
    assert pq_error(keys, many["codebooks"], many["codes"]) < pq_error(keys, few["codebooks"], few["codes"])
