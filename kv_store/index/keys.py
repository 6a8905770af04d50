"""One head's keys, as float32 when they are asked for: whole copies of long prompts cost more than fitting them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest
from kv_store.client.row_format import RowFormat

Keys: TypeAlias = npt.NDArray[np.float32]

# Of a span: what is made of so many stays in a core's cache.
SPAN_ROWS = 4096


class KeySource(ABC):
    """Rows of keys by number. Every read raises InvalidStoreRequest where a key is not finite."""

    @property
    @abstractmethod
    def num_rows(self) -> int: ...

    @abstractmethod
    def rows(self, numbers: npt.NDArray[np.int64]) -> Keys:
        """These rows, float32 [k, d]."""

    @abstractmethod
    def span(self, begin: int, end: int) -> Keys:
        """Rows from `begin` to before `end`, float32 [end - begin, d]."""

    def spans(self) -> Iterator[tuple[int, Keys]]:
        """All rows, some at a time: the first one's number, and the rows."""
        for begin in range(0, self.num_rows, SPAN_ROWS):
            yield begin, self.span(begin, min(begin + SPAN_ROWS, self.num_rows))

    def all(self) -> Keys:
        """Every row, float32 [N, d]."""
        return self.span(0, self.num_rows)


class ArrayKeys(KeySource):
    """Keys that are an array float32 [N, d] already."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    @property
    def num_rows(self) -> int:
        return self._keys.shape[0]

    def rows(self, numbers: npt.NDArray[np.int64]) -> Keys:
        return _finite(self._keys[numbers], "the keys")

    def span(self, begin: int, end: int) -> Keys:
        return _finite(self._keys[begin:end], "the keys")


class ArenaKeys(KeySource):
    """Keys of one head in the slabs of a layer, in the arena's row format.

    slabs: uint8 [all slabs, H, tokens of a slab, row bytes]. slab_ids: those of the layer, in order. skip: tokens of
    the first slab before row 0.
    """

    def __init__(
        self,
        slabs: npt.NDArray[np.uint8],
        row_format: RowFormat,
        slab_ids: npt.NDArray[np.int64],
        head: int,
        skip: int,
        num_rows: int,
    ) -> None:
        self._slabs = slabs
        self._format = row_format
        self._slab_ids = slab_ids
        self._head = head
        self._skip = skip
        self._num_rows = num_rows

    @property
    def num_rows(self) -> int:
        return self._num_rows

    def rows(self, numbers: npt.NDArray[np.int64]) -> Keys:
        places, per_slab = numbers + self._skip, self._slabs.shape[2]
        slabs = self._slab_ids[places // per_slab]
        return self._read(self._slabs[slabs, self._head, places % per_slab, : self._format.key_bytes])

    def span(self, begin: int, end: int) -> Keys:
        per_slab = self._slabs.shape[2]
        first, last = (begin + self._skip) // per_slab, (end - 1 + self._skip) // per_slab
        raw = self._slabs[self._slab_ids[first : last + 1], self._head, :, : self._format.key_bytes]
        start = begin + self._skip - first * per_slab
        return self._read(raw.reshape(-1, self._format.key_bytes)[start : start + end - begin])

    def _read(self, raw: npt.NDArray[np.uint8]) -> Keys:
        keys = as_float32(raw, self._format.element)
        return _finite(keys, f"the keys of KV head {self._head}")


def as_float32(raw: npt.NDArray[np.uint8], element: str) -> Keys:
    """Elements of a type, uint8 [n, bytes] whose bytes are contiguous, as float32 [n, elements]."""
    match element:
        case "fp32":
            return raw.view(np.float32)
        case "fp16":
            return raw.view(np.float16).astype(np.float32)
        case _:
            # bf16 is the upper half of a float32.
            return np.left_shift(raw.view(np.uint16), 16, dtype=np.uint32).view(np.float32)


def _finite(keys: Keys, what: str) -> Keys:
    if not np.isfinite(keys).all():
        raise InvalidStoreRequest(f"{what} hold a NaN or an infinity")
    return keys


def first_equals(rows: Keys) -> npt.NDArray[np.int64]:
    """Number each row of [n, w] by the first that equals it, -0.0 and 0.0 alike: int64 [n]."""
    first: dict[bytes, int] = {}
    # Adding zero makes -0.0 and 0.0 one.
    return np.array(
        [first.setdefault(row.tobytes(), number) for number, row in enumerate(rows + 0.0)], np.int64
    )
