"""A row's size follows from its format alone, on both sides of the wire."""

from __future__ import annotations

import pytest

from kv_store.client import InvalidStoreRequest, Layout, RowFormat
from kv_store.client.layout import SlabGeometry
from kv_store.client.row_format import ELEMENT_BYTES, MAX_HEAD_DIM
from kv_store.client.wire import layout_from_message, layout_to_message
from kv_store.v1 import kv_store_pb2 as pb


@pytest.mark.parametrize(
    ("row_format", "key_bytes", "row_bytes", "row_elements"),
    [
        (RowFormat(128), 256, 512, 256),
        (RowFormat(24, "fp16"), 48, 96, 48),
        (RowFormat(1, "fp32"), 4, 8, 2),
        (RowFormat(128, "bf16", scale_bytes=8), 256, 520, 260),
    ],
)
def test_sizes(row_format: RowFormat, key_bytes: int, row_bytes: int, row_elements: int) -> None:
    found = (row_format.key_bytes, row_format.row_bytes, row_format.row_elements)
    assert found == (key_bytes, row_bytes, row_elements)


@pytest.mark.parametrize(
    ("head_dim", "element", "scale_bytes", "reason"),
    [
        (0, "bf16", 0, f"head_dim is 0, it must be from 1 to {MAX_HEAD_DIM}"),
        (MAX_HEAD_DIM + 1, "bf16", 0, f"head_dim is {MAX_HEAD_DIM + 1}"),
        (16, "int3", 0, "element type 'int3' is none of bf16, fp16, fp32"),
        (16, "fp32", 6, "scale_bytes is 6, it must be a multiple of 4"),
        (16, "fp32", -4, "scale_bytes is -4"),
    ],
)
def test_odd_formats_are_refused(head_dim: int, element: str, scale_bytes: int, reason: str) -> None:
    with pytest.raises(InvalidStoreRequest, match=reason):
        RowFormat(head_dim, element, scale_bytes)


def test_slabs_hold_whole_rows_with_their_scales() -> None:
    layout = Layout(1, 2, RowFormat(16, "bf16", scale_bytes=8))
    assert layout.token_bytes == 2 * 72
    assert SlabGeometry(layout, 8 * layout.token_bytes).tokens_per_slab == 8
    assert SlabGeometry(layout, 8 * layout.token_bytes - 1).tokens_per_slab == 4


@pytest.mark.parametrize("element", ELEMENT_BYTES)
def test_a_layout_crosses_the_wire(element: str) -> None:
    layout = Layout(3, 2, RowFormat(24, element))
    message = pb.Layout.FromString(layout_to_message(layout).SerializeToString())
    assert layout_from_message(message) == layout


def test_the_wire_refuses_scales_and_unknown_types() -> None:
    with pytest.raises(InvalidStoreRequest, match="8 bytes of scales"):
        layout_to_message(Layout(3, 2, RowFormat(24, scale_bytes=8)))
    message = layout_to_message(Layout(3, 2, RowFormat(24)))
    message.row_type = 77  # type: ignore[assignment]
    with pytest.raises(InvalidStoreRequest, match="element type 'number 77' is none of"):
        layout_from_message(message)
