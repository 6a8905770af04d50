"""One head's keys, as float32 when they are asked for: whole copies of long prompts cost more than fitting them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest
from kv_store.client.row_format import RowFormat

Keys: TypeAlias = npt.NDArray[np.float32]

# Of a span: what is made of so many stays in a core's cache.
SPAN_ROWS = 4096


class ArenaKeys:
    """Keys of one head in the slabs of a layer, by number. A read of one that is not finite raises InvalidStoreRequest.

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
        self.num_rows = num_rows

    def rows(self, numbers: npt.NDArray[np.int64]) -> Keys:
        """Return these rows, float32 [k, d]."""
        places, per_slab = numbers + self._skip, self._slabs.shape[2]
        slabs = self._slab_ids[places // per_slab]
        return self._read(self._slabs[slabs, self._head, places % per_slab, : self._format.key_bytes])

    def spans(self) -> Iterator[tuple[int, Keys]]:
        """Yield all rows, some at a time: the first one's number, and the rows."""
        for begin in range(0, self.num_rows, SPAN_ROWS):
            yield begin, self.span(begin, min(begin + SPAN_ROWS, self.num_rows))

    def all(self) -> Keys:
        """Return every row, float32 [N, d]."""
        return self.span(0, self.num_rows)

    def span(self, begin: int, end: int) -> Keys:
        """Return rows from `begin` to before `end`, float32 [end - begin, d]."""
        per_slab = self._slabs.shape[2]
        first, last = (begin + self._skip) // per_slab, (end - 1 + self._skip) // per_slab
        raw = self._slabs[self._slab_ids[first : last + 1], self._head, :, : self._format.key_bytes]
        start = begin + self._skip - first * per_slab
        return self._read(raw.reshape(-1, self._format.key_bytes)[start : start + end - begin])

    def _read(self, raw: npt.NDArray[np.uint8]) -> Keys:
        keys = as_float32(raw, self._format.element)
        if not np.isfinite(keys).all():
            raise InvalidStoreRequest(f"the keys of KV head {self._head} hold a NaN or an infinity")
        return keys


class ArrayKeys(ArenaKeys):
    """Keys that are an array float32 [N, d]: an arena of one slab."""

    def __init__(self, keys: Keys) -> None:
        slabs = np.ascontiguousarray(keys, np.float32).view(np.uint8)[None, None]
        super().__init__(slabs, RowFormat(keys.shape[1], "fp32"), np.zeros(1, np.int64), 0, 0, len(keys))


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


def first_equals(rows: Keys) -> npt.NDArray[np.int64]:
    """Number each row of [n, w] by the first that equals it, -0.0 and 0.0 alike: int64 [n]."""
    first: dict[bytes, int] = {}
    # Adding zero makes -0.0 and 0.0 one.
    return np.array(
        [first.setdefault(row.tobytes(), number) for number, row in enumerate(rows + 0.0)], np.int64
    )
