"""PQ and K-means against plain numpy; bounds of the adaptive rule."""

from dataclasses import replace

import faiss
import numpy as np
import pytest

from kv_store.client import BitParams, IndexParams, KMeansParams, Layout, PQParams, RowFormat
from kv_store.client.errors import InvalidStoreRequest
from kv_store.client.layout import SlabGeometry
from kv_store.index import ArenaKeys, ArrayKeys, Effort, FitCost, FitOptions, IterationBound, make_index
from kv_store.index import keys as keys_module

OPTIONS = FitOptions(max_iterations=8, seed=3, max_points_per_centroid=0)


def clustered(num_rows: int, dim: int, num_centres: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = 4 * rng.standard_normal((num_centres, dim))
    rows = centres[rng.integers(num_centres, size=num_rows)] + 0.3 * rng.standard_normal((num_rows, dim))
    return rows.astype(np.float32)


def squared_distances(rows: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    return ((rows[:, None].astype(np.float64) - centroids[None]) ** 2).sum(-1)


def cosines(rows: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)  # noqa: E731
    return unit(rows.astype(np.float64)) @ unit(centroids.astype(np.float64)).T


@pytest.mark.parametrize(("parts", "bits", "num_rows"), [(2, 4, 500), (4, 6, 300), (1, 8, 400), (2, 1, 50)])
def test_pq_codes_name_the_nearest_centroid(parts: int, bits: int, num_rows: int) -> None:
    keys = clustered(num_rows, 16, 20)
    index = make_index(PQParams(parts, bits))
    fit = index.fit_head(ArrayKeys(keys), OPTIONS)
    (codebooks, codes), iterations = fit.arrays, fit.iterations
    assert iterations == 8
    assert codebooks.shape == (parts, 2**bits, 16 // parts)
    assert (codes.shape, codes.dtype) == ((num_rows, parts), np.uint8)
    for part in range(parts):
        distances = squared_distances(keys[:, part * 16 // parts : (part + 1) * 16 // parts], codebooks[part])
        chosen = distances[np.arange(num_rows), codes[:, part]]
        assert np.allclose(chosen, distances.min(axis=1), rtol=1e-4, atol=1e-4)


def test_pq_fits_better_than_random_codebooks() -> None:
    keys = clustered(600, 16, 12)
    (codebooks, codes) = make_index(PQParams(2, 5)).fit_head(ArrayKeys(keys), OPTIONS).arrays
    rebuilt = np.concatenate([codebooks[part][codes[:, part]] for part in range(2)], axis=1)
    assert ((keys - rebuilt) ** 2).mean() < 0.1 * keys.var()


@pytest.mark.parametrize(
    "params",
    [PQParams(2, 4), PQParams(2, 4, 0, "ip"), KMeansParams(9), KMeansParams(9, "l2"), KMeansParams(9, "ip")],
)
def test_the_same_seed_gives_the_same_index(params: PQParams | KMeansParams) -> None:
    keys = clustered(400, 16, 15)
    index = make_index(params)
    first, again = (
        index.fit_head(ArrayKeys(keys), OPTIONS).arrays,
        index.fit_head(ArrayKeys(keys.copy()), OPTIONS).arrays,
    )
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    other = index.fit_head(ArrayKeys(keys), FitOptions(8, 4, 0)).arrays
    assert not (first[0] == other[0]).all()


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_codebooks_alone_are_those_that_come_with_codes(metric: str) -> None:
    keys, params = clustered(600, 16, 12), PQParams(2, 4, 0, metric)
    whole = make_index(params).fit_head(ArrayKeys(keys), OPTIONS).arrays
    alone = make_index(replace(params, codebooks_only=True))
    found = alone.fit_head(ArrayKeys(keys), OPTIONS).arrays
    assert all(np.array_equal(a, b) for a, b in zip(found, (whole[0], *whole[2:]), strict=True))
    assert not alone.is_searchable


class LastOfEquals(faiss.ProductQuantizer):
    """Break ties the other way: the last of equally near centroids is named, where FAISS leaves it to the processor."""

    def compute_codes(self, rows: np.ndarray) -> np.ndarray:
        codebooks = faiss.vector_to_array(self.centroids).reshape(self.M, self.ksub, self.dsub)
        parts = rows.reshape(len(rows), self.M, self.dsub)
        distances = [squared_distances(parts[:, part], codebooks[part])[:, ::-1] for part in range(self.M)]
        return np.stack([self.ksub - 1 - each.argmin(axis=1) for each in distances], axis=1).astype(np.uint8)


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 5, 16])
def test_pq_with_too_few_rows_is_exact(num_rows: int, num_bits: int, metric: str) -> None:
    keys = clustered(num_rows, 8, 5)
    fit = make_index(PQParams(2, num_bits, 0, metric)).fit_head(ArrayKeys(keys), OPTIONS)
    (codebooks, codes), iterations = fit.arrays[:2], fit.iterations
    assert iterations == 0
    assert codebooks.shape == (2, 2**num_bits, 4 + (metric == "ip"))
    rebuilt = np.concatenate([codebooks[part][codes[:, part], :4] for part in range(2)], axis=1)
    assert (rebuilt == keys).all()
    assert (codebooks[:, num_rows:] == codebooks[:, num_rows - 1 : num_rows]).all()
    assert codes.tolist() == [[row, row] for row in range(num_rows)]


def test_pq_with_too_few_rows_names_each_row_where_rounding_would_not() -> None:
    # Squares of such lengths have no place for the differences.
    keys = (1000 + clustered(12, 64, 12) / 100).astype(np.float32)
    _, codes = make_index(PQParams(2, 4)).fit_head(ArrayKeys(keys), OPTIONS).arrays
    assert codes.tolist() == [[row, row] for row in range(12)]


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_later_tokens_are_coded_by_the_first_of_equal_centroids(
    metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faiss, "ProductQuantizer", LastOfEquals)
    index, keys = make_index(PQParams(2, 8, 0, metric)), clustered(5, 8, 5)
    keys[3, :4] = keys[1, :4]
    keys[4, 4:] = keys[0, 4:]
    arrays = index.fit_head(ArrayKeys(keys), OPTIONS).arrays
    later = index.extend_head(ArrayKeys(keys), arrays)
    assert later.tolist() == [[0, 0], [1, 1], [2, 2], [1, 3], [4, 0]]
    # Zero has two signs.
    keys[0], keys[1] = 0.0, -0.0
    arrays = index.fit_head(ArrayKeys(keys[:2]), OPTIONS).arrays
    assert index.extend_head(ArrayKeys(keys[:2]), arrays).tolist() == [[0, 0], [0, 0]]


def test_cosine_labels_are_the_nearest_direction_and_centroids_keep_length() -> None:
    rng = np.random.default_rng(1)
    keys = clustered(500, 16, 10) * rng.uniform(0.1, 10, (500, 1)).astype(np.float32)
    (centroids, labels) = make_index(KMeansParams(10)).fit_head(ArrayKeys(keys), OPTIONS).arrays
    assert (labels.dtype, centroids.dtype) == (np.int32, np.float32)
    similarity = cosines(keys, centroids)
    assert np.allclose(similarity[np.arange(500), labels], similarity.max(axis=1), atol=1e-5)
    assert not np.allclose(np.linalg.norm(centroids, axis=1), 1.0, atol=0.1)
    # Nearly every centroid is still the mean of its members: the last assignment moves few rows.
    means = np.stack(
        [keys[labels == c].mean(axis=0) if (labels == c).any() else centroids[c] for c in range(10)]
    )
    assert np.isclose(means, centroids, rtol=1e-3, atol=1e-3).all(axis=1).mean() >= 0.5


def test_l2_labels_are_the_nearest_centroid() -> None:
    keys = clustered(500, 16, 10)
    (centroids, labels) = make_index(KMeansParams(10, "l2")).fit_head(ArrayKeys(keys), OPTIONS).arrays
    distances = squared_distances(keys, centroids)
    assert np.allclose(distances[np.arange(500), labels], distances.min(axis=1), rtol=1e-4, atol=1e-4)


def test_inner_product_labels_are_of_the_largest_product_with_a_mean() -> None:
    keys = clustered(500, 16, 10)
    (centroids, labels) = make_index(KMeansParams(10, "ip")).fit_head(ArrayKeys(keys), OPTIONS).arrays
    products = keys @ centroids.T
    assert np.allclose(products[np.arange(500), labels], products.max(axis=1), rtol=1e-4, atol=1e-3)
    # By L2 or by cosine some keys would be elsewhere, and unit centroids would be shorter.
    assert (squared_distances(keys, centroids).argmin(axis=1) != labels).any()
    assert (cosines(keys, centroids).argmax(axis=1) != labels).any()
    assert np.linalg.norm(centroids, axis=1).max() > 2
    # Few clusters settle: each is the mean of those that are nearest to it by this metric, not by L2.
    (centroids, labels) = (
        make_index(KMeansParams(4, "ip")).fit_head(ArrayKeys(keys), FitOptions(40, 3, 0)).arrays
    )
    means = np.stack([keys[labels == cluster].mean(axis=0) for cluster in range(4)])
    assert np.allclose(means, centroids, rtol=1e-3, atol=1e-3)


def test_pq_by_inner_product_adds_a_coordinate_to_each_part() -> None:
    keys = np.array([[3, 4, 0, 1], [0, 1, 2, 0], [5, 0, 0, 0]], np.float32)
    index = make_index(PQParams(2, 2, 0, "ip"))
    (codebooks, codes, norms) = index.fit_head(ArrayKeys(keys), OPTIONS).arrays
    # As few rows as that are their own centroids, with sqrt(phi - |x|^2) behind them.
    assert norms.tolist() == [25, 4]
    assert np.allclose(codebooks[0, :3], [[3, 4, 0], [0, 1, 24**0.5], [5, 0, 0]])
    assert np.allclose(codebooks[1, :3], [[0, 1, 3**0.5], [2, 0, 0], [0, 0, 2]])
    assert codes.tolist() == [[0, 0], [1, 1], [2, 2]]
    # Products with (1, 0, 0, 1) are 4, 0 and 5; the coordinates that were added, of up to 4.9, have no part in them.
    query = np.array([[1, 0, 0, 1]], np.float32)
    best = [index.select_head(query, [(codebooks, codes, norms)], k, 0.5).tolist() for k in (1, 2)]
    assert best == [[2], [0, 2]]


def test_pq_by_inner_product_codes_name_the_nearest_of_keys_of_one_length() -> None:
    keys = clustered(500, 16, 20)
    index = make_index(PQParams(2, 4, 0, "ip"))
    arrays = index.fit_head(ArrayKeys(keys), OPTIONS).arrays
    codebooks, codes, norms = arrays
    for part in range(2):
        rows = keys[:, part * 8 : part * 8 + 8].astype(np.float64)
        squares = (rows**2).sum(1)
        assert np.isclose(norms[part], squares.max())
        lifted = np.column_stack([rows, np.sqrt(np.maximum(norms[part] - squares, 0))])
        distances = squared_distances(lifted, codebooks[part])
        chosen = distances[np.arange(500), codes[:, part]]
        assert np.allclose(chosen, distances.min(axis=1), rtol=1e-3, atol=1e-3)
        # No centroid is farther out than the keys, which all lie on one sphere.
        assert (np.square(codebooks[part]).sum(1) <= norms[part] * 1.001).all()


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_more_clusters_than_rows_leaves_empty_ones(metric: str) -> None:
    keys = clustered(6, 8, 3)
    index = make_index(KMeansParams(10, metric))
    (centroids, labels) = index.fit_head(ArrayKeys(keys), OPTIONS).arrays
    assert centroids.shape == (10, 8)
    assert np.bincount(labels, minlength=10).tolist() == [1] * 6 + [0] * 4
    assert index.select_head(keys[:1], [(centroids, labels)], 6, 1.0).tolist() == list(range(6))


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_keys_that_clusters_tie_for_are_of_the_first(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def last_of_equals(
        points: np.ndarray, centroids: np.ndarray, k: int, metric: int
    ) -> tuple[None, np.ndarray]:
        products = points @ centroids.T
        nearest = -squared_distances(points, centroids) if metric == faiss.METRIC_L2 else products
        return None, len(centroids) - 1 - nearest[:, ::-1].argmax(axis=1)[:, None]

    monkeypatch.setattr(faiss, "knn", last_of_equals)
    keys = np.zeros((40, 8), np.float32)
    keys[:5, 0] = 4.0
    (centroids, labels) = make_index(KMeansParams(9, metric)).fit_head(ArrayKeys(keys), OPTIONS).arrays
    for row, label in enumerate(labels):
        assert label == (centroids == centroids[label]).all(axis=1).argmax()
        assert metric != "l2" or np.allclose(centroids[label], keys[row], atol=0.1)
    assert metric == "l2" or (labels[5:] == 0).all()


@pytest.mark.parametrize(
    "params",
    [
        PQParams(0, 4),
        PQParams(3, 4),
        PQParams(2, 0),
        PQParams(2, 9),
        KMeansParams(0),
        KMeansParams(2**31),
        KMeansParams(4, "dot"),
        PQParams(2, 4, 0, "cosine"),
        PQParams(2, 4, 0, "dot"),
        BitParams(-1),
        BitParams(10),
        BitParams(2**31),
    ],
)
def test_parameters_out_of_range_are_refused(params: IndexParams) -> None:
    with pytest.raises(InvalidStoreRequest):
        make_index(params).specs(Layout(1, 1, RowFormat(16)), 10)


def test_the_bound_hides_training_under_prefill() -> None:
    bound = IterationBound(default_iterations=10, num_trainers=2)
    assert bound.effort("pq", 1000, 500, 1.0) == Effort(10)
    # 0.2 ms a token, and 0.1 ms an iteration and point
    bound.observe("pq", FitCost(1000, 500, 10, seconds=0.7, iterating_seconds=0.5))
    assert bound.effort("pq", 1000, 500, 0.0) == Effort(10)
    # Half of two trainers' second, less 0.2 s for the tokens: 0.8 s, at 50 ms an iteration.
    assert bound.effort("pq", 1000, 500, 1.0).iterations == pytest.approx(16, abs=1)
    assert bound.effort("pq", 3000, 500, 1.0).iterations == pytest.approx(8, abs=1)
    assert bound.effort("pq", 1000, 1000, 1.0).iterations == pytest.approx(8, abs=1)
    assert bound.effort("pq", 1000, 500, 1.0).share == 1
    assert bound.effort("pq", 1000, 500, 1e6) == Effort(300)
    assert bound.effort("kmeans", 1000, 500, 1.0) == Effort(10)


def test_where_the_fewest_iterations_take_too_long_a_fit_has_fewer_points() -> None:
    bound = IterationBound(default_iterations=10, num_trainers=2)
    # 0.1 ms an iteration and point, nothing beside
    bound.observe("pq", FitCost(1000, 500, 10, seconds=0.5, iterating_seconds=0.5))
    assert bound.effort("pq", 1000, 500, 0.16) == Effort(3)
    few = bound.effort("pq", 1000, 500, 0.12)
    assert few.iterations == 3
    assert few.share == pytest.approx(0.8)
    assert bound.effort("pq", 1000, 500, 1e-6) == Effort(3, 0.5)


def test_a_fit_goes_over_no_more_points_than_it_may() -> None:
    keys = clustered(3000, 8, 4)
    index = make_index(PQParams(2, 4))
    assert index.num_points(3000, 0) == 3000
    assert index.num_points(3000, 100) == 1600
    assert index.num_points(1500, 100) == 1500
    few = index.fit_head(ArrayKeys(keys), FitOptions(8, 3, 100)).arrays
    codebooks, codes = few
    assert codes.shape == (3000, 2)
    # Centroids of a part of the rows are about as near to all of them.
    every = index.fit_head(ArrayKeys(keys), OPTIONS).arrays
    errors = [
        sum(
            float(squared_distances(keys[:, 4 * part : 4 * part + 4], books[part]).min(1).sum())
            for part in range(2)
        )
        for books in (codebooks, every[0])
    ]
    assert errors[0] == pytest.approx(errors[1], rel=0.3)
    again = index.fit_head(ArrayKeys(keys), FitOptions(8, 3, 100)).arrays
    assert all(np.array_equal(a, b) for a, b in zip(few, again, strict=True))


@pytest.mark.parametrize("element", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("skip", [0, 3])
def test_keys_in_slabs_are_read_in_order(element: str, skip: int) -> None:
    rng = np.random.default_rng(0)
    layout = Layout(1, 2, RowFormat(8, element))
    geometry = SlabGeometry(layout, 16 * layout.token_bytes)
    keys = rng.integers(-4, 5, (41, 8)).astype(np.float32)
    arena = np.frombuffer(rng.bytes(8 * geometry.slab_bytes), np.uint8).copy()
    slab_ids = np.array([5, 2, 7], np.int64)
    slabs = geometry.rows(arena)
    for number, key in enumerate(keys):
        slab, place = divmod(number + skip, geometry.tokens_per_slab)
        if element == "bf16":
            raw = (key.view(np.uint32) >> 16).astype(np.uint16)
        else:
            raw = key.astype(np.float16 if element == "fp16" else np.float32)
        slabs[slab_ids[slab], 1, place, : layout.row_format.key_bytes] = raw.view(np.uint8)
    source = ArenaKeys(slabs, layout.row_format, slab_ids, 1, skip, 41)
    assert source.num_rows == 41
    assert source.all().shape == (41, 8)
    assert (source.all() == keys).all()
    for begin, end in [(0, 1), (12, 14), (15, 33), (40, 41)]:
        assert (source.span(begin, end) == keys[begin:end]).all()
    numbers = np.array([40, 0, 13, 14])
    assert (source.rows(numbers) == keys[numbers]).all()


def test_a_long_head_is_fitted_some_rows_at_a_time() -> None:
    """As it would be at once, to the bit."""
    keys = clustered(2 * keys_module.SPAN_ROWS + 77, 8, 30)
    for params in (PQParams(2, 4), PQParams(2, 4, 0, "ip")):
        fit = make_index(params).fit_head(ArrayKeys(keys), FitOptions(4, 0, 10))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keys_module, "SPAN_ROWS", 1 << 20)
            whole = make_index(params).fit_head(ArrayKeys(keys), FitOptions(4, 0, 10))
        assert all(np.array_equal(a, b) for a, b in zip(fit.arrays, whole.arrays, strict=True))


def test_keys_that_are_not_finite_are_refused() -> None:
    keys = clustered(600, 8, 5)
    keys[599, 3] = np.inf
    for params in (PQParams(2, 4), PQParams(2, 4, 0, "ip"), KMeansParams(5), BitParams(2)):
        with pytest.raises(InvalidStoreRequest, match="infinity"):
            make_index(params).fit_head(ArrayKeys(keys), FitOptions(4, 0, 10))


@pytest.mark.parametrize(
    "params",
    [
        PQParams(2, 6),
        PQParams(4, 3, metric="ip"),
        PQParams(2, 5, codebooks_only=True),
        KMeansParams(9),
        BitParams(5),
    ],
)
def test_a_fit_has_the_arrays_that_a_worker_counts_on(params: IndexParams) -> None:
    specs = params.specs(Layout(2, 3, RowFormat(24, "bf16")), 101)
    fit = make_index(params).fit_head(ArrayKeys(clustered(101, 24, 9)), OPTIONS)
    assert [each.shape for each in fit.arrays] == [spec.shape[1:] for spec in specs]
    assert [each.dtype.name for each in fit.arrays] == [spec.dtype for spec in specs]
