"""Product quantisation of keys (PQCache 3.1): one codebook for each part of each head, by L2 or inner product."""

from __future__ import annotations

import time
from collections.abc import Sequence

import faiss
import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest
from kv_store.client.indexes import PQ_METRICS, ArraySpec, PQParams
from kv_store.client.layout import Layout
from kv_store.index.base import Array, Fit, FitOptions, Index, top_k_positions
from kv_store.index.keys import ArenaKeys, Keys, first_equals

_SEED_MASK = 0x7FFF_FFFF
_NO_LIMIT = 1 << 30
# Of more centroids the pairs are too many for a table.
_MAX_PAIR_KSUB = 128


class PQIndex(Index):
    """Arrays: codebooks float32 [H, m, 2**b, d/m], codes uint8 [H, N, m] unless `codebooks_only`.

    By inner product keys are fitted and coded with a coordinate more in each part (`_parts_of`, PQ-A4): centroids have
    it too, their last one, and what it was made with is a third array, max_square_norms float32 [H, m].
    """

    kind = "pq"

    def __init__(self, params: PQParams) -> None:
        if not 1 <= params.num_bits <= 8:
            raise InvalidStoreRequest(f"num_bits is {params.num_bits}, it must be from 1 to 8")
        if params.metric not in PQ_METRICS:
            raise InvalidStoreRequest(f"metric {params.metric!r} of PQ is none of {', '.join(PQ_METRICS)}")
        super().__init__(params, 1 << params.num_bits)
        self._parts = params.num_subvectors
        self._bits = params.num_bits
        self._is_ip = params.metric == "ip"
        self.is_searchable = not params.codebooks_only
        if params.codebooks_only:
            self.costs_like = "pq codebooks"

    def specs(self, layout: Layout, num_tokens: int) -> tuple[ArraySpec, ...]:
        if self._parts < 1 or layout.row_format.head_dim % self._parts:
            raise InvalidStoreRequest(
                f"num_subvectors {self._parts} does not divide head_dim {layout.row_format.head_dim}"
            )
        return super().specs(layout, num_tokens)

    def fit_head(self, keys: ArenaKeys, options: FitOptions) -> Fit:
        max_square_norms = self._max_square_norms(keys) if self._is_ip else None
        num_rows, num_centroids = keys.num_rows, self.num_centroids
        codes: Array | None
        if num_rows <= num_centroids:
            # Too few rows to fit: each row is its own centroid, the last one fills the rest.
            filled = np.minimum(np.arange(num_centroids), num_rows - 1)
            codebooks = np.ascontiguousarray(self._parts_of(keys.all(), max_square_norms)[:, filled])
            # By its number: which of equal or nearly equal centroids a search finds depends on the processor.
            own = np.arange(num_rows, dtype=np.uint8)[:, None]
            codes = np.ascontiguousarray(np.broadcast_to(own, (num_rows, self._parts)))
            iterations, seconds = 0, 0.0
        else:
            drawn = self._sample(keys, options)
            begun = time.perf_counter()
            codebooks = self._train(self._parts_of(drawn, max_square_norms), options)
            iterations, seconds = options.max_iterations, time.perf_counter() - begun
            codes = self._codes(keys, codebooks, max_square_norms) if self.is_searchable else None
        arrays = (codebooks, codes if self.is_searchable else None, max_square_norms)
        return Fit(tuple(each for each in arrays if each is not None), iterations, seconds)

    def _codes(self, keys: ArenaKeys, codebooks: Keys, max_square_norms: Keys | None) -> Array:
        """Name the nearest centroid of each part, of codebooks float32 [m, 2**b, w]: uint8 [n, m]."""
        codes = np.empty((keys.num_rows, self._parts), np.uint8)
        quantizer = faiss.ProductQuantizer(self._parts * codebooks.shape[2], self._parts, self._bits)
        faiss.copy_array_to_vector(np.ascontiguousarray(codebooks).ravel(), quantizer.centroids)
        # FAISS leaves it to the processor which of equal centroids it names: the first one here.
        first = np.stack([first_equals(codebook) for codebook in codebooks])
        for begin, rows in keys.spans():
            parts = self._parts_of(rows, max_square_norms).transpose(1, 0, 2)
            packed = quantizer.compute_codes(np.ascontiguousarray(parts).reshape(len(rows), -1))
            found = faiss.unpack_bitstrings(packed, self._parts, self._bits)
            codes[begin : begin + len(rows)] = first[np.arange(self._parts), found]
        return codes

    def extend_head(self, keys: ArenaKeys, arrays: tuple[Array, ...]) -> Array:
        return self._codes(keys, arrays[0], arrays[2] if self._is_ip else None)

    def select_head(
        self, queries: Keys, segments: Sequence[tuple[Array, ...]], k: int, scale: float
    ) -> npt.NDArray[np.int64]:
        if len(segments) != 1:
            raise InvalidStoreRequest(
                f"the candidates are in {len(segments)} PQ indexes: build one over their first tokens"
            )
        codebooks, codes = segments[0][:2]
        # A query's added coordinate would be 0.
        return top_k_positions(
            pq_scores(queries, codebooks[..., : queries.shape[1] // self._parts], codes, scale), k
        )

    def _sample(self, keys: ArenaKeys, options: FitOptions) -> Keys:
        num_points = self.num_points(keys.num_rows, options.max_points_per_centroid)
        if num_points == keys.num_rows:
            return keys.all()
        drawn = np.random.default_rng(options.seed).choice(keys.num_rows, num_points, replace=False)
        return keys.rows(np.sort(drawn))

    def _train(self, parts: Keys, options: FitOptions) -> Keys:
        num_parts, num_points, width = parts.shape
        quantizer = faiss.ProductQuantizer(num_parts * width, num_parts, self._bits)
        quantizer.cp.niter = options.max_iterations
        quantizer.cp.seed = options.seed & _SEED_MASK
        quantizer.cp.min_points_per_centroid = 1
        quantizer.cp.max_points_per_centroid = _NO_LIMIT
        quantizer.train(np.ascontiguousarray(parts.transpose(1, 0, 2)).reshape(num_points, num_parts * width))
        return faiss.vector_to_array(quantizer.centroids).reshape(num_parts, self.num_centroids, width)

    def _parts_of(self, rows: Keys, max_square_norms: Keys | None) -> Keys:
        """Rows [n, d] as parts [m, n, w]; by inner product with sqrt(phi - |x|^2) as a last coordinate.

        All rows of a part then are of one length: the nearest to a query is that of the largest product with it.
        """
        parts = self._split(rows)
        if max_square_norms is None:
            return parts
        height = np.sqrt(np.maximum(max_square_norms[:, None] - _squares(parts), 0.0))
        return np.concatenate([parts, height[..., None]], axis=2)

    def _split(self, rows: Keys) -> Keys:
        return rows.reshape(len(rows), self._parts, -1).transpose(1, 0, 2)

    def _max_square_norms(self, keys: ArenaKeys) -> Keys:
        """phi, the largest |x|^2 of each part: float32 [m]."""
        return np.max([_squares(self._split(rows)).max(axis=1) for _, rows in keys.spans()], axis=0)


def _squares(parts: Keys) -> Keys:
    return np.einsum("mnw,mnw->mn", parts, parts)


@np.errstate(over="ignore", invalid="ignore")
def pq_scores(queries: Keys, codebooks: Keys, codes: npt.NDArray[np.uint8], scale: float) -> Keys:
    """PQCache 3.2: inner products by table, softmax over the rows per query, summed over the group.

    queries [G, d], codebooks [m, 2**b, d/m], codes [N, m]; scale: of the softmax. Returns float32 [N], NaN where inner
    products overflow.
    """
    parts, ksub, width = codebooks.shape
    tables = np.einsum("gpw,pjw->gpj", queries.reshape(-1, parts, width) * np.float32(scale), codebooks)
    if parts == 2 and ksub <= _MAX_PAIR_KSUB:
        # Two codes determine a weight: one exponential for each pair that occurs, and none for a row.
        pairs = codes[:, 0].astype(np.int64) * ksub + codes[:, 1]
        counts = np.bincount(pairs, minlength=ksub * ksub)
        logits = (tables[:, 0, :, None] + tables[:, 1, None, :]).reshape(len(queries), -1)
        logits[:, counts == 0] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return (weights / (weights @ counts.astype(np.float32))[:, None]).sum(axis=0)[pairs]
    logits = np.zeros((len(queries), len(codes)), np.float32)
    for part in range(parts):
        logits += tables[:, part, codes[:, part]]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
