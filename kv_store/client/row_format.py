"""The size and type of one K|V row. Nothing else counts a row's elements or bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kv_store.client.errors import InvalidStoreRequest

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
MAX_HEAD_DIM = 4096


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One token's row in one KV head: `head_dim` elements of its key, as many of its value, then their scales.

    element: type of the elements, a name in ELEMENT_BYTES.
    scale_bytes: bytes of the scales, a whole number of elements. No element type needs scales yet.

    Raises InvalidStoreRequest for a size out of range or an unknown element type.
    """

    head_dim: int
    element: str = "bf16"
    scale_bytes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.head_dim <= MAX_HEAD_DIM:
            raise InvalidStoreRequest(
                f"rows: head_dim is {self.head_dim}, it must be from 1 to {MAX_HEAD_DIM}"
            )
        if self.element not in ELEMENT_BYTES:
            known = ", ".join(ELEMENT_BYTES)
            raise InvalidStoreRequest(f"rows: element type {self.element!r} is none of {known}")
        if self.scale_bytes < 0 or self.scale_bytes % self.element_bytes:
            raise InvalidStoreRequest(
                f"rows: scale_bytes is {self.scale_bytes}, it must be a multiple of {self.element_bytes}, from 0"
            )

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.element]

    @property
    def key_bytes(self) -> int:
        """Bytes of the key, with which a row begins; the value has as many."""
        return self.head_dim * self.element_bytes

    @property
    def row_bytes(self) -> int:
        return 2 * self.key_bytes + self.scale_bytes

    @property
    def row_elements(self) -> int:
        """Elements that a row takes up, its scales included."""
        return self.row_bytes // self.element_bytes
