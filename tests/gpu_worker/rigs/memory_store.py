"""A store in the test's own memory with the client's interface: no process, no FAISS, no arena."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from kv_store.client import (
    Begun,
    IndexSegment,
    KMeansParams,
    Layout,
    NotInStore,
    PQParams,
    RowsWanted,
    StoreError,
    StoreFull,
    StoreSilent,
    StoreUnreachable,
)
from kv_store.client.ends import SequenceEnd


class MemoryStore:
    """Rows in one array a sequence. `capacity_tokens` bounds what all sequences may reserve.

    While `failure` is set every call raises it; StoreSilent, which stands for `silent_for` seconds by now, leaves those
    that only read and write rows, as in shared memory.
    """

    transport = "memory"
    selects_in_store = False
    tokens_per_slab = 64
    max_gather_rows = 300

    def __init__(self, layout: Layout, capacity_tokens: int = 1 << 20) -> None:
        self.layout = layout
        self.capacity_tokens = capacity_tokens
        self.rows: dict[str, np.ndarray] = {}
        # Rows [L, H, tokens_per_slab, row_bytes] by the name of their prefix.
        self.prefixes: dict[bytes, np.ndarray] = {}
        # Names of the prefixes that a session holds.
        self.sessions: dict[str, tuple[bytes, ...]] = {}
        self.sealed: dict[str, int] = {}
        self.shared: dict[str, int] = {}
        # What has ended, and was not told yet.
        self._ended: list[SequenceEnd] = []
        self.num_gathers = 0
        self.num_corrupt = 0
        self.failure: Exception | None = None
        self.silent_for = 1.0
        # What the heartbeat has learnt, known without asking.
        self.lost: Exception | None = None

    def _check(self, is_call: bool = True) -> None:
        if self.failure and (is_call or not self.silent_seconds):
            raise self.failure

    def begin(
        self,
        sequence_id: str,
        num_tokens: int,
        prefix_hashes: Sequence[bytes] = (),
        takes_less: bool = False,
        owner: str = "",
    ) -> Begun:
        self._check()
        self._tell()
        known = list(itertools.takewhile(self.prefixes.__contains__, prefix_hashes))
        num_shared = len(known) * self.tokens_per_slab
        self.rows[sequence_id] = np.empty(0, np.uint8)
        if known:
            self.rows[sequence_id] = np.concatenate([self.prefixes[name] for name in known], axis=2)
            self.sealed[sequence_id] = self.shared[sequence_id] = num_shared
        try:
            return Begun(num_shared, self.reserve(sequence_id, num_tokens))
        except StoreFull:
            if not (takes_less and known):
                self._end(SequenceEnd(sequence_id))
            if not takes_less:
                raise
        return Begun(num_shared, np.zeros((self.layout.num_layers, len(known)), np.int32))

    def reserve(self, sequence_id: str, num_tokens: int) -> np.ndarray:
        self._check()
        others = sum(
            rows.shape[2] for name, rows in self.rows.items() if name != sequence_id and rows.ndim == 4
        )
        padded = -(-num_tokens // self.tokens_per_slab) * self.tokens_per_slab
        if others + padded > self.capacity_tokens:
            missing = (others + padded - self.capacity_tokens) * self.layout.token_bytes
            raise StoreFull(f"{missing} bytes are missing", missing_bytes=missing)
        layout, old = self.layout, self.rows[sequence_id]
        grown = np.full(
            (layout.num_layers, layout.num_kv_heads, padded, layout.row_format.row_bytes), 255, np.uint8
        )
        if old.ndim == 4:
            grown[:, :, : old.shape[2]] = old
        self.rows[sequence_id] = grown
        return np.zeros((layout.num_layers, padded // self.tokens_per_slab), np.int32)

    def missing_alone(self, num_tokens: int, indexes: Sequence[object] = ()) -> int:
        """Indexes take no room here."""
        padded = -(-num_tokens // self.tokens_per_slab) * self.tokens_per_slab
        return max(0, padded - self.capacity_tokens) * self.layout.token_bytes

    def put(self, sequence_id: str, layer: int, token_begin: int, rows: np.ndarray) -> None:
        self._check(is_call=False)
        self.rows[sequence_id][layer, :, token_begin : token_begin + rows.shape[1]] = rows

    def seal(
        self,
        sequence_id: str,
        num_tokens: int,
        layer_begin: int = 0,
        layer_end: int | None = None,
        prefix_hashes: Sequence[bytes] = (),
        session_id: str = "",
        session_label: str = "",
    ) -> None:
        self._check()
        self.sealed[sequence_id] = num_tokens
        for place, name in enumerate(prefix_hashes):
            slab = slice(place * self.tokens_per_slab, (place + 1) * self.tokens_per_slab)
            self.prefixes.setdefault(name, self.rows[sequence_id][:, :, slab].copy())
        if session_id and prefix_hashes:
            self.sessions[session_id] = tuple(prefix_hashes)

    def drop_session(self, session_id: str) -> None:
        self._check()
        self._tell()
        if session_id not in self.sessions:
            raise NotInStore("no such session")
        for name in self.sessions.pop(session_id):
            self.prefixes.pop(name, None)

    def verify(self, sequence_id: str) -> Future[int]:
        """As the client's, which asks in the background: an error is the future's."""
        verified: Future[int] = Future()
        try:
            self._check()
        except StoreError as error:
            verified.set_exception(error)
        else:
            verified.set_result(self.num_corrupt)
        return verified

    def gather(self, layer: int, wanted: Sequence[RowsWanted]) -> np.ndarray:
        self._check(is_call=False)
        self.num_gathers += 1
        return np.concatenate(
            [self.rows[item.sequence_id][layer, item.kv_head, item.positions] for item in wanted]
        )

    def build_index(
        self,
        sequence_id: str,
        layer: int,
        token_begin: int,
        token_end: int,
        params: PQParams | KMeansParams,
        seed: int = 0,
        prefill_seconds: float = 0.0,
    ) -> Future[IndexSegment]:
        self._check()
        rows = self.rows[sequence_id][layer, :, token_begin:token_end]
        keys = rows.view(np.float32)[..., : self.layout.row_format.head_dim]
        future: Future[IndexSegment] = Future()
        if isinstance(params, PQParams):
            parts = np.split(keys, params.num_subvectors, axis=-1)
            norms = np.stack([np.square(part).sum(-1).max(-1) for part in parts], axis=1)
            if params.metric == "ip":
                parts = [lengthened(part, norms[:, place]) for place, part in enumerate(parts)]
            books = [np.stack([lloyd(head, 2**params.num_bits, seed)[0] for head in part]) for part in parts]
            arrays = {"codebooks": np.stack(books, axis=1)}
            if params.metric == "ip":
                arrays["max_square_norms"] = norms
            if not params.codebooks_only:
                codes = [nearest(part, book) for part, book in zip(parts, books, strict=True)]
                arrays["codes"] = np.stack(codes, axis=2).astype(np.uint8)
            future.set_result(IndexSegment("pq", arrays, 0.0, 4))
        else:
            fits = [lloyd(head, params.num_clusters, seed) for head in keys]
            centroids, labels = np.stack([fit[0] for fit in fits]), np.stack([fit[1] for fit in fits])
            arrays = {"centroids": centroids, "labels": labels.astype(np.int32)}
            future.set_result(IndexSegment("kmeans", arrays, 0.0, 4))
        return future

    def end(
        self, sequence_id: str, num_tokens: int = 0, prefix_hashes: Sequence[bytes] = (), *session: str
    ) -> None:
        self._ended.append(SequenceEnd(sequence_id, num_tokens, tuple(prefix_hashes), *session))
        self._tell()

    def _tell(self) -> None:
        """Apply ends of sequences, once the store answers."""
        while self._ended and not isinstance(self.failure, StoreUnreachable):
            end = self._ended.pop(0)
            if self.failure is None:
                self._end(end)

    def _end(self, end: SequenceEnd) -> None:
        if end.num_tokens and end.sequence_id in self.rows:
            session = end.session_id, end.session_label
            self.seal(end.sequence_id, end.num_tokens, 0, None, end.prefix_hashes, *session)
        self.rows.pop(end.sequence_id, None)
        self.shared.pop(end.sequence_id, None)

    def cut_to_prefix(self, sequence_id: str) -> None:
        self._check()
        if self.rows[sequence_id].ndim == 4:
            self.rows[sequence_id] = self.rows[sequence_id][:, :, : self.shared.get(sequence_id, 0)]

    def check(self) -> None:
        if self.lost:
            raise self.lost
        self._tell()

    @property
    def is_answering(self) -> bool:
        return not any(isinstance(error, StoreUnreachable) for error in (self.failure, self.lost))

    @property
    def silent_seconds(self) -> float:
        return self.silent_for if isinstance(self.failure, StoreSilent) else 0.0

    def unmap(self) -> None:
        pass

    def reattach(self) -> None:
        self._check()
        self.lost = None
        self._ended.clear()

    def close(self) -> None:
        self.rows.clear()


def nearest(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Each point's centroid, the first of those equally near: points [..., N, d], centroids [..., C, d]; [..., N].

    Keys of one token at three positions in a row are equally far apart but for rounding, which batches change.
    """
    away = np.square(centroids).sum(-1)[..., None, :] - 2 * points @ centroids.swapaxes(-1, -2)
    return (away <= away.min(axis=-1, keepdims=True) + 1e-3).argmax(axis=-1)


def lengthened(part: np.ndarray, max_square_norms: np.ndarray) -> np.ndarray:
    """Keys [H, T, d] with a coordinate more, by which those of one head are equally long: [H, T, d + 1]."""
    room = max_square_norms[:, None] - np.square(part).sum(-1)
    return np.concatenate([part, np.sqrt(room.clip(min=0))[..., None]], axis=-1)


def lloyd(keys: np.ndarray, num_clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Four rounds of K-means by L2: centroids float32 [C, d] and labels [N]."""
    rng = np.random.default_rng(seed)
    centroids = keys[rng.choice(len(keys), num_clusters, replace=len(keys) < num_clusters)].astype(np.float32)
    for _ in range(4):
        labels = nearest(keys, centroids)
        for cluster in np.unique(labels):
            centroids[cluster] = keys[labels == cluster].mean(0)
    return centroids, labels
