"""Reads layers of a known prefix from the arena's slabs while the layer before is computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.row_format import row_word
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
        self._used_bytes = arena.num_kv_heads * layout.tokens_per_slab * layout.row_format.row_bytes
        self._most = max(1, stage_bytes // layout.slab_bytes)
        self._beside = SideStream(device)
        # Moved in the widest words that a row is a multiple of, as they were written.
        self._word = row_word(layout.row_format.row_bytes)
        self._stage: Tensor | None = None
        self._staged_heads: Tensor | None = None

    def read(self, slabs: npt.NDArray[np.int32], rows: Tensor, free: Mark | None = None) -> Mark:
        """Start to fill rows [H_kv, n, 2d] with n tokens, which fill these slabs; they must be in `slab_tables`.

        free: from when on rows may be written, beside what is queued by now. At the mark all of them are there; until
        then nothing else may read or write them.
        """
        layout = self._arena.layout
        per_granule = self._arena.granule_bytes // layout.slab_bytes
        with self._beside.queue():
            if free is not None:
                free.hold()
            # Few operations: a layer is read in less time than many of them take the host.
            wanted = rows.view(self._word).unflatten(1, (-1, layout.tokens_per_slab))
            for begin, end in contiguous_runs(slabs, self._most, per_granule):
                self._read_run(wanted[:, begin:end], int(slabs[begin]))
            return Mark(self._device)

    def _read_run(self, wanted: Tensor, slab: int) -> None:
        """The arena's slabs from `slab` on, as [H_kv, n, tokens of a slab, words of a row]."""
        num_slabs, slab_bytes = wanted.shape[1], self._arena.layout.slab_bytes
        stage, heads = self._staging()
        place = self._arena.host[slab * slab_bytes : (slab + num_slabs) * slab_bytes]
        stage[: num_slabs * slab_bytes].copy_(place, non_blocking=True)
        wanted.copy_(heads[:, :num_slabs])

    def _staging(self) -> tuple[Tensor, Tensor]:
        """The stage, uint8 [bytes], and its rows by heads, [H_kv, slabs, tokens of a slab, words of a row]."""
        if self._stage is None or self._staged_heads is None:
            layout, num_heads = self._arena.layout, self._arena.num_kv_heads
            with torch.inference_mode(False):
                num_bytes = self._most * layout.slab_bytes
                self._stage = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                used = self._stage.view(self._most, -1)[:, : self._used_bytes].view(self._word)
                by_slab = used.unflatten(1, (num_heads, layout.tokens_per_slab, -1))
                self._staged_heads = by_slab.transpose(0, 1)
        return self._stage, self._staged_heads
