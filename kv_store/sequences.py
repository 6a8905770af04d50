"""Live sequences with their slab tables and indexes, and live workers with their leases."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest, NotInStore
from kv_store.client.indexes import ArrayRef
from kv_store.client.layout import SlabGeometry
from kv_store.client.slab_tables import SlabTable
from kv_store.index import Index

_MAX_ID_CHARACTERS = 256


def check_id(name: str, value: str) -> None:
    """Raises InvalidStoreRequest for an empty or overlong id."""
    if not value:
        raise InvalidStoreRequest(f"{name} is empty")
    check_length(name, value)


def check_length(name: str, value: str) -> None:
    if len(value) > _MAX_ID_CHARACTERS:
        raise InvalidStoreRequest(f"{name} has {len(value)} characters, it may have {_MAX_ID_CHARACTERS}")


@dataclass(slots=True)
class StoredIndex:
    """A finished index of one layer's candidates [token_begin, token_end); `slabs` are in a row, and hold `arrays`.

    added: [num_kv_heads, n, ...], what `Index.extend_head` made of the first n tokens behind them; None: of none yet.
    """

    kind: Index
    layer: int
    token_begin: int
    token_end: int
    slabs: range
    arrays: tuple[ArrayRef, ...]
    added: npt.NDArray[Any] | None = None

    @property
    def known_end(self) -> int:
        """The first token that the index knows nothing of."""
        return self.token_end + (0 if self.added is None else self.added.shape[1])


class Sequence(SlabTable):
    """A worker's sequence in the store."""

    def __init__(self, worker_id: str, sequence_id: str, geometry: SlabGeometry, owner: str = "") -> None:
        super().__init__(sequence_id, geometry)
        self.worker_id = worker_id
        self.owner = owner
        self.prefix_hashes: tuple[bytes, ...] = ()
        # A slab of it is not what was written there: others must not find what it holds.
        self.is_corrupt = False
        self.indexes: list[StoredIndex] = []
        # Index trainings that have not ended.
        self.trainings: set[Future[Any]] = set()

    @property
    def num_tokens(self) -> int:
        """Tokens sealed in every layer."""
        return int(self.sealed.min())

    @property
    def held_bytes(self) -> int:
        """Bytes of the sealed rows, all layers and heads."""
        return int(self.sealed.sum()) * self.geometry.layout.token_bytes

    def check_sealed(self, layer: int, token_begin: int, token_end: int) -> None:
        """Raises InvalidStoreRequest unless the range is not empty and all of it is sealed in `layer`."""
        self.check_layer(layer)
        if not 0 <= token_begin < token_end <= int(self.sealed[layer]):
            raise InvalidStoreRequest(
                f"tokens {token_begin} to {token_end} of layer {layer}: the range must not be empty and must "
                f"lie within the {int(self.sealed[layer])} sealed tokens of sequence {self.sequence_id!r}"
            )

    def indexes_over(self, layer: int, token_begin: int, token_end: int) -> list[StoredIndex]:
        """Indexes of one kind that adjoin each other from `token_begin` on, as far as there are any below `token_end`.

        Of several that begin at the same token the latest is taken. Raises InvalidStoreRequest where none begins.
        """
        by_begin = {index.token_begin: index for index in self.indexes if index.layer == layer}
        found: list[StoredIndex] = []
        at = token_begin
        while (
            at < token_end and at in by_begin and (not found or by_begin[at].kind.kind == found[0].kind.kind)
        ):
            found.append(by_begin[at])
            at = found[-1].token_end
        if not found:
            raise InvalidStoreRequest(
                f"no index of layer {layer} of sequence {self.sequence_id!r} begins at token {token_begin}: build one"
            )
        return found

    def grow(self, added: npt.NDArray[np.int32]) -> None:
        """Append slabs: int32 [num_layers, added]."""
        self.table = np.concatenate([self.table, added], axis=1)

    def cut_to_prefix(self) -> npt.NDArray[np.int32]:
        own = super().cut_to_prefix()
        self.prefix_hashes = self.prefix_hashes[: self.slabs_per_layer]
        return own


class SequenceTable:
    """Live sequences by worker and id; a worker sees only its own."""

    def __init__(self) -> None:
        self._sequences: dict[tuple[str, str], Sequence] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __len__(self) -> int:
        return len(self._sequences)

    def find(self, worker_id: str, sequence_id: str) -> Sequence | None:
        return self._sequences.get((worker_id, sequence_id))

    def get(self, worker_id: str, sequence_id: str) -> Sequence:
        """Raises NotInStore."""
        sequence = self.find(worker_id, sequence_id)
        if sequence is None:
            raise NotInStore(f"worker {worker_id!r} holds no sequence {sequence_id!r}")
        return sequence

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.worker_id, sequence.sequence_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.worker_id, sequence.sequence_id]

    def of_worker(self, worker_id: str) -> list[Sequence]:
        return [sequence for sequence in self if sequence.worker_id == worker_id]


@dataclass(slots=True)
class Worker:
    """An attached worker and its response segment (`response_slabs` in a row, possibly none)."""

    worker_id: str
    response_slabs: range
    expires_at: float
    # One response segment: two Gathers of one worker take turns.
    gather_lock: threading.Lock = field(default_factory=threading.Lock)
