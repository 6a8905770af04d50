"""Rows as tensors have the bytes that their format says."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.row_format import empty_rows, keys_and_values, row_dtype, row_format, row_word
from kv_store.client import RowFormat
from kv_store.client.row_format import ELEMENT_BYTES

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_stored_as_they_are_computed(dtype: torch.dtype) -> None:
    found = row_format(24, dtype)
    assert row_dtype(found) == dtype
    assert (found.head_dim, found.element_bytes, found.scale_bytes) == (24, dtype.itemsize, 0)


@pytest.mark.parametrize("element", ELEMENT_BYTES)
@pytest.mark.parametrize("scale_bytes", [0, 8])
def test_tensors_hold_whole_rows(element: str, scale_bytes: int) -> None:
    of_rows = RowFormat(6, element, scale_bytes)
    rows = empty_rows(of_rows, 3, 5, device=CPU)
    assert rows.shape[:2] == (3, 5)
    assert rows.nbytes == 15 * of_rows.row_bytes


def test_keys_come_before_values() -> None:
    rows = empty_rows(RowFormat(3, "fp32"), 2, device=CPU)
    keys, values = keys_and_values(rows)
    keys.fill_(1)
    values.fill_(2)
    assert rows.tolist() == [[1, 1, 1, 2, 2, 2]] * 2


@pytest.mark.parametrize("row_bytes", [4, 8, 12, 512, 520])
def test_rows_are_moved_in_whole_words(row_bytes: int) -> None:
    word = row_word(row_bytes)
    assert row_bytes % word.itemsize == 0
    assert word == torch.int64 or row_bytes % 8
