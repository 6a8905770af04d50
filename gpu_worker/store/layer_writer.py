"""Writes prefilled layers into the arena's slabs while the next layer is computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.store.arena import ArenaView
from gpu_worker.store.side_stream import SideStream

# Rows in slab order that wait for their copy: enough for one copy to be long, little beside a layer.
STAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PendingLayer:
    """A prefilled layer on its way to the arena: at `copied` it is there, and may be overwritten on the device."""

    layer: int
    copied: Mark


class LayerWriter:
    """Puts rows into the order of slabs on the device, then copies runs of slabs, all on a stream of its own.

    The copies need only the bus, and reordering takes a few microseconds for every millisecond of copying.
    """

    def __init__(self, arena: ArenaView, device: torch.device, stage_bytes: int = STAGE_BYTES) -> None:
        layout = arena.layout
        self._arena = arena
        self._device = device
        self._used_bytes = arena.num_kv_heads * layout.tokens_per_slab * layout.row_bytes
        self._most = max(1, stage_bytes // self._used_bytes)
        self._beside = SideStream(device)
        self._stage: Tensor | None = None

    def write(self, rows: Tensor, slabs: npt.NDArray[np.int32]) -> Mark:
        """Start to copy rows [H_kv, n, 2d] into the layer's slabs; they must be in `slab_tables`.

        At the mark all of it is in the arena; until then nothing may write to `rows` or read from the slabs.
        """
        num_slabs = -(-rows.shape[1] // self._arena.layout.tokens_per_slab)
        per_granule = self._arena.granule_bytes // self._arena.layout.slab_bytes
        with self._beside.queue():
            for begin, end in contiguous_runs(slabs[:num_slabs], self._most, per_granule):
                self._write_run(rows, begin, end, int(slabs[begin]))
            return Mark(self._device)

    def wait(self) -> None:
        """Let the host wait until nothing is being copied any more."""
        self._beside.wait()

    def _write_run(self, rows: Tensor, begin: int, end: int, slab: int) -> None:
        """Slabs [begin, end) of the layer to the arena's from `slab` on."""
        staged = self._staged(rows, begin, end)
        host, slab_bytes = self._arena.host, self._arena.layout.slab_bytes
        if self._used_bytes == slab_bytes:
            place = host[slab * slab_bytes : (slab + end - begin) * slab_bytes]
            place.copy_(staged.flatten(), non_blocking=True)
            return
        for offset, one in enumerate(staged):
            first = (slab + offset) * slab_bytes
            host[first : first + self._used_bytes].copy_(one, non_blocking=True)

    def _staged(self, rows: Tensor, begin: int, end: int) -> Tensor:
        """Slabs [begin, end) as the arena holds them, zeros behind the last token: uint8 [slabs, used bytes]."""
        if self._stage is None:
            with torch.inference_mode(False):
                shape = (self._most, self._used_bytes)
                self._stage = torch.empty(shape, dtype=torch.uint8, device=self._device)
        layout = self._arena.layout
        per_slab, num_heads = layout.tokens_per_slab, self._arena.num_kv_heads
        # Moved in the widest words that a row is a multiple of: rows have an even number of elements.
        word = torch.int64 if layout.row_bytes % 8 == 0 else torch.int32
        words = rows.view(word)[:, begin * per_slab : end * per_slab]
        stage = self._stage[: end - begin]
        slabs = stage.view(word).view(end - begin, num_heads, per_slab, words.shape[2])
        num_full, num_rest = divmod(words.shape[1], per_slab)
        full = words[:, : num_full * per_slab].view(num_heads, num_full, per_slab, words.shape[2])
        slabs[:num_full] = full.transpose(0, 1)
        if num_rest:
            slabs[num_full] = 0
            slabs[num_full, :, :num_rest] = words[:, num_full * per_slab :]
        return stage


def contiguous_runs(slabs: npt.NDArray[np.int32], most: int, per_granule: int) -> list[tuple[int, int]]:
    """Index ranges of slabs in a row of the arena, of at most `most` and within a granule of `per_granule`."""
    runs: list[tuple[int, int]] = []
    begin = 0
    for index in range(1, len(slabs) + 1):
        is_end = (
            index == len(slabs)
            or slabs[index] != slabs[index - 1] + 1
            or slabs[index] % per_granule == 0
            or index - begin == most
        )
        if is_end:
            runs.append((begin, index))
            begin = index
    return runs
