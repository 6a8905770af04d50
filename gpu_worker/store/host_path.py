"""Moves rows between device and store through the host, where the device cannot reach the arena itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.row_format import row_dtype
from gpu_worker.store.kv_meter import KVMeter
from gpu_worker.store.link import StoreLink
from kv_store.client import RowsWanted, StoreClient


class HostPath:
    """Puts and gathers rows through the store's client. Raises what `StoreLink.call_once` raises: it is used in the
    middle of a step, which cannot be repeated."""

    def __init__(self, client: StoreClient, link: StoreLink, meter: KVMeter, device: torch.device) -> None:
        self._client = client
        self._link = link
        self._meter = meter
        self._device = device

    def put(self, sequence_id: str, layer: int, begin: int, data: npt.NDArray[np.uint8]) -> None:
        """Write the rows of a layer's tokens from `begin` on: uint8 [H_kv, n, row_bytes]."""
        self._link.call_once(lambda: self._client.put(sequence_id, layer, begin, data))

    def gather(self, layer: int, items: list[RowsWanted]) -> Tensor:
        """The items' rows, [sum of n, 2d] on the device, in as many calls as the response slab's size asks for."""
        return torch.cat(
            [self._one_call(layer, call) for call in in_calls(items, self._client.max_gather_rows)]
        )

    def _one_call(self, layer: int, items: list[RowsWanted]) -> Tensor:
        with self._meter.gather.timed():
            found = self._link.call_once(lambda: self._client.gather(layer, items))
        # The response slab is reused by the next gather: copied before anyone can ask for it.
        return self.rows(found)

    def rows(self, data: npt.NDArray[np.uint8]) -> Tensor:
        """A copy of rows uint8 [n, row_bytes]: [n, 2d] on the device."""
        with self._meter.copy.timed() if len(data) else contextlib.nullcontext():
            row_format = self._client.layout.row_format
            flat = torch.from_numpy(np.array(data).ravel()).view(row_dtype(row_format))
            return flat.view(len(data), row_format.row_elements).to(self._device)


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
