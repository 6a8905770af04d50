"""K|V rows as tensors: their format for a model's type, and their memory."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kv_store.client import RowFormat

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ELEMENTS = {dtype: element for element, dtype in _DTYPES.items()}


@cache
def row_format(head_dim: int, dtype: torch.dtype) -> RowFormat:
    """The format of rows that are stored as they are computed."""
    return RowFormat(head_dim, _ELEMENTS[dtype])


def row_dtype(row_format: RowFormat) -> torch.dtype:
    """The type of a row's elements."""
    return _DTYPES[row_format.element]


def empty_rows(row_format: RowFormat, *size: int, device: torch.device) -> Tensor:
    """Uninitialised rows [*size, row_elements]."""
    return torch.empty(*size, row_format.row_elements, dtype=row_dtype(row_format), device=device)


def keys_and_values(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Views of rows [..., 2d] without scales: both [..., d]."""
    keys, values = rows.chunk(2, dim=-1)
    return keys, values


def row_word(row_bytes: int) -> torch.dtype:
    """The widest integer that rows consist of. PyTorch moves one at a time."""
    return torch.int64 if row_bytes % 8 == 0 else torch.int32
