"""MemoryStore with the store's own rules about what may be written and read when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from memory_store import MemoryStore

from kv_store.client import (
    Begun,
    IndexSegment,
    InvalidStoreRequest,
    KMeansParams,
    Layout,
    NotInStore,
    PQParams,
    RowsWanted,
)
from kv_store.client.ends import SequenceEnd


class StrictStore(MemoryStore):
    """Refuses to read or to train on unsealed rows, to write rows of full sealed slabs, and unknown sequences.

    `segments` are the indexes given out, by (sequence, layer, first token). While `holds_builds` is set, indexes are
    not given out until `finish_builds`.
    """

    def __init__(self, layout: Layout, capacity_tokens: int = 1 << 20, tokens_per_slab: int = 64) -> None:
        super().__init__(layout, capacity_tokens)
        self.tokens_per_slab = tokens_per_slab
        self.sealed_at: dict[str, list[int]] = defaultdict(lambda: [0] * layout.num_layers)
        self.segments: dict[tuple[str, int, int], IndexSegment] = {}
        self.num_attached = 1
        self.holds_builds = False
        self.held_builds: list[tuple[Future[IndexSegment], Future[IndexSegment]]] = []

    def _known(self, sequence_id: str, is_call: bool = True) -> None:
        self._check(is_call)
        if sequence_id not in self.rows:
            raise NotInStore(f"no sequence {sequence_id}")

    def reserve(self, sequence_id: str, num_tokens: int) -> np.ndarray:
        self._known(sequence_id)
        return super().reserve(sequence_id, num_tokens)

    def reattach(self) -> None:
        super().reattach()
        self.rows.clear()
        self.prefixes.clear()
        self.sealed_at.clear()
        self.num_attached += 1

    def put(self, sequence_id: str, layer: int, token_begin: int, rows: np.ndarray) -> None:
        self._known(sequence_id, is_call=False)
        immutable = self.sealed_at[sequence_id][layer] // self.tokens_per_slab * self.tokens_per_slab
        end = token_begin + rows.shape[1]
        if not immutable <= token_begin < end <= self.rows[sequence_id].shape[2]:
            raise InvalidStoreRequest(f"tokens [{token_begin}, {end}) of layer {layer} cannot be written")
        super().put(sequence_id, layer, token_begin, rows)

    def begin(
        self,
        sequence_id: str,
        num_tokens: int,
        prefix_hashes: Sequence[bytes] = (),
        takes_less: bool = False,
        owner: str = "",
    ) -> Begun:
        begun = super().begin(sequence_id, num_tokens, prefix_hashes, takes_less, owner)
        self.sealed_at[sequence_id] = [begun.num_shared] * self.layout.num_layers
        return begun

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
        self._known(sequence_id)
        full = num_tokens // self.tokens_per_slab
        if len(prefix_hashes) > full or (prefix_hashes and layer_end not in (None, self.layout.num_layers)):
            raise InvalidStoreRequest(
                f"{len(prefix_hashes)} hashes for {full} full slabs of layer {layer_end}"
            )
        super().seal(sequence_id, num_tokens, 0, None, prefix_hashes, session_id, session_label)
        for layer in range(layer_begin, self.layout.num_layers if layer_end is None else layer_end):
            self.sealed_at[sequence_id][layer] = max(self.sealed_at[sequence_id][layer], num_tokens)

    def gather(self, layer: int, wanted: Sequence[RowsWanted]) -> np.ndarray:
        for item in wanted:
            self._known(item.sequence_id, is_call=False)
            if len(item.positions) and item.positions.max() >= self.sealed_at[item.sequence_id][layer]:
                raise InvalidStoreRequest(f"position {item.positions.max()} of layer {layer} is not sealed")
        if sum(len(item.positions) for item in wanted) > self.max_gather_rows:
            raise InvalidStoreRequest("more rows than the response slab holds")
        return super().gather(layer, wanted)

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
        self._known(sequence_id)
        if not token_begin < token_end <= self.sealed_at[sequence_id][layer]:
            raise InvalidStoreRequest(f"[{token_begin}, {token_end}) of layer {layer} is not sealed")
        future = super().build_index(
            sequence_id, layer, token_begin, token_end, params, seed, prefill_seconds
        )
        self.segments[sequence_id, layer, token_begin] = future.result()
        if not self.holds_builds:
            return future
        held: Future[IndexSegment] = Future()
        self.held_builds.append((held, future))
        return held

    def finish_builds(self) -> None:
        """Give out the indexes kept back while `holds_builds` was set."""
        for held, future in self.held_builds:
            if held.set_running_or_notify_cancel():
                held.set_result(future.result())
        self.held_builds.clear()

    def _end(self, end: SequenceEnd) -> None:
        super()._end(end)
        self.sealed_at.pop(end.sequence_id, None)
