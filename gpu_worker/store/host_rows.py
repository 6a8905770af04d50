"""Rows on their way through the host: as the arena's bytes, and in calls that fit the store's answer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kv_store.client import RowsWanted


def host_bytes(rows: Tensor) -> npt.NDArray[np.uint8]:
    """Rows [..., 2d] as the arena holds them: uint8 [..., row_bytes], on a CPU the same memory."""
    return rows.view(torch.uint8).cpu().numpy()


def in_calls(items: list[RowsWanted], max_rows: int) -> Iterator[list[RowsWanted]]:
    """The items in order, cut into calls of at most `max_rows` rows."""
    call: list[RowsWanted] = []
    room = max_rows
    for item in items:
        positions = item.positions
        while len(positions) > room:
            call.append(RowsWanted(item.sequence_id, item.kv_head, positions[:room]))
            yield call
            positions, call, room = positions[room:], [], max_rows
        if len(positions):
            call.append(RowsWanted(item.sequence_id, item.kv_head, positions))
            room -= len(positions)
    if call:
        yield call
