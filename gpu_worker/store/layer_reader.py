"""Reads layers of a known prefix from the arena's slabs while the layer before is computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.store.arena import ArenaView
from gpu_worker.store.layer_writer import STAGE_BYTES, contiguous_runs
from gpu_worker.store.side_stream import SideStream


class LayerReader:
    """Copies runs of slabs, then puts their rows into the order of heads on the device, all on a stream of its own: the
    way back of `LayerWriter`."""

    def __init__(self, arena: ArenaView, device: torch.device, stage_bytes: int = STAGE_BYTES) -> None:
        layout = arena.layout
        self._arena = arena
        self._device = device
        self._used_bytes = arena.num_kv_heads * layout.tokens_per_slab * layout.row_bytes
        self._most = max(1, stage_bytes // layout.slab_bytes)
        self._beside = SideStream(device)
        self._stage: Tensor | None = None

    def read(self, slabs: npt.NDArray[np.int32], rows: Tensor, free: Mark | None = None) -> Mark:
        """Start to fill rows [H_kv, n, 2d] with n tokens, which fill these slabs; they must be in `slab_tables`.

        free: from when on rows may be written, beside what is queued by now. At the mark all of them are there; until
        then nothing else may read or write them.
        """
        per_granule = self._arena.granule_bytes // self._arena.layout.slab_bytes
        with self._beside.queue():
            if free is not None:
                free.hold()
            for begin, end in contiguous_runs(slabs, self._most, per_granule):
                self._read_run(rows, begin, end, int(slabs[begin]))
            return Mark(self._device)

    def _read_run(self, rows: Tensor, begin: int, end: int, slab: int) -> None:
        """Slabs [begin, end) of the layer from the arena's from `slab` on."""
        layout, num_heads = self._arena.layout, self._arena.num_kv_heads
        per_slab, slab_bytes = layout.tokens_per_slab, layout.slab_bytes
        stage = self._staging()[: end - begin]
        place = self._arena.host[slab * slab_bytes : (slab + end - begin) * slab_bytes]
        stage.view(-1).copy_(place, non_blocking=True)
        # Moved in the widest words that a row is a multiple of, as they were written.
        word = torch.int64 if layout.row_bytes % 8 == 0 else torch.int32
        found = stage[:, : self._used_bytes].view(word).unflatten(1, (num_heads, per_slab, -1))
        wanted = rows.view(word)[:, begin * per_slab : end * per_slab].unflatten(1, (end - begin, per_slab))
        wanted.copy_(found.transpose(0, 1))

    def _staging(self) -> Tensor:
        """uint8 [slabs, slab bytes]."""
        if self._stage is None:
            with torch.inference_mode(False):
                shape = (self._most, self._arena.layout.slab_bytes)
                self._stage = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return self._stage
