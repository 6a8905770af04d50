"""Copies of layers between the device and the arena's slabs, while another layer is computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import Mark, SideStream
from gpu_worker.row_format import row_word
from gpu_worker.store.arena import ArenaView

# Bytes of staged rows in slab order: enough for one copy to be long, few next to those of a layer.
STAGE_BYTES = 64 << 20


class LayerWriter:
    """Writes prefilled layers: puts rows into the order of slabs on the device, then copies runs of slabs, all on a
    side stream.

    The copies need only the bus, and reordering takes a few microseconds for every millisecond of copying.
    """

    def __init__(self, arena: ArenaView, device: torch.device, stage_bytes: int = STAGE_BYTES) -> None:
        layout = arena.layout
        self._arena = arena
        self._device = device
        self._used_bytes = arena.num_kv_heads * layout.tokens_per_slab * layout.row_format.row_bytes
        self._most = max(1, stage_bytes // self._used_bytes)
        self._beside = SideStream(device)
        # Moved in the widest words that a row is a multiple of: rows have an even number of elements.
        self._word = row_word(layout.row_format.row_bytes)
        self._stage: Tensor | None = None
        self._staged_heads: Tensor | None = None

    def write(self, rows: Tensor, slabs: npt.NDArray[np.int32]) -> Mark:
        """Start to copy rows [L, H_kv, n, 2d] of some layers into their slabs, [L, >= those of n tokens], which must be
        in `slab_tables`.

        At the mark all of it is in the arena; until then nothing may write to `rows` or read from the slabs.
        """
        num_slabs = -(-rows.shape[2] // self._arena.layout.tokens_per_slab)
        with self._beside.queue():
            begun = Mark(self._device)
            if num_slabs:
                words = rows.view(self._word)
                # Of short prompts many layers are copied at once.
                at_once = max(1, self._most // num_slabs)
                for first in range(0, len(rows), at_once):
                    some = slice(first, first + at_once)
                    of_layers = words if at_once >= len(rows) else words[some]
                    for begin in range(0, num_slabs, self._most):
                        end = min(begin + self._most, num_slabs)
                        self._write_some(of_layers, begin, slabs[some, begin:end])
            return Mark(self._device, begun)

    def wait(self) -> None:
        """Let the host wait until nothing is being copied any more."""
        self._beside.wait()

    def _write_some(self, words: Tensor, begin: int, slabs: npt.NDArray[np.int32]) -> None:
        """Write the slabs of each layer from its `begin` on to the arena's, [L, n slabs].

        words: the rows as words, [L, H_kv, n, words].
        """
        self._put_in_order(words, begin, slabs.shape[1])
        places = slabs.ravel()
        per_granule = self._arena.granule_bytes // self._arena.layout.slab_bytes
        for first, end in contiguous_runs(places, self._most, per_granule):
            self._write_run(first, end, int(places[first]))

    def _write_run(self, first: int, end: int, slab: int) -> None:
        """Copy the staged slabs [first, end) to the arena's slabs from `slab` on."""
        stage, _ = self._staging()
        host, slab_bytes, used = self._arena.host, self._arena.layout.slab_bytes, self._used_bytes
        # Where slabs are full their rows are one copy.
        at_once = end - first if used == slab_bytes else 1
        for offset in range(0, end - first, at_once):
            place = (slab + offset) * slab_bytes
            staged = stage[(first + offset) * used : (first + offset + at_once) * used]
            host[place : place + at_once * used].copy_(staged, non_blocking=True)

    def _put_in_order(self, words: Tensor, begin: int, num_slabs: int) -> None:
        """Stage so many slabs of each layer as the arena holds them, zeros behind the last token."""
        _, heads = self._staging()
        num_layers, per_slab = len(words), self._arena.layout.tokens_per_slab
        if begin or num_slabs * per_slab < words.shape[2]:
            words = words[:, :, begin * per_slab : (begin + num_slabs) * per_slab]
        slabs = heads[: num_layers * num_slabs].unflatten(0, (num_layers, num_slabs))
        num_full, num_rest = divmod(words.shape[2], per_slab)
        if num_full:
            full = words[:, :, : num_full * per_slab].unflatten(2, (num_full, per_slab))
            slabs[:, :num_full] = full.transpose(1, 2)
        if num_rest:
            last = slabs[:, num_full]
            last.zero_()
            last[:, :, :num_rest].copy_(words[:, :, num_full * per_slab :] if num_full else words)

    def _staging(self) -> tuple[Tensor, Tensor]:
        """The stage, uint8 [slabs x used bytes], and as rows, [slabs, H_kv, tokens of a slab, words of a row]."""
        if self._stage is None or self._staged_heads is None:
            num_bytes, layout = self._most * self._used_bytes, self._arena.layout
            by_head = (self._most, self._arena.num_kv_heads, layout.tokens_per_slab, -1)
            with torch.inference_mode(False):
                self._stage = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                self._staged_heads = self._stage.view(self._word).unflatten(0, by_head)
        return self._stage, self._staged_heads


class LayerReader:
    """Reads layers of a known prefix: copies runs of slabs, then puts their rows into the order of heads on the device,
    all on a side stream."""

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

        free: mark from which on rows may be written, while the work that is queued by now runs. At the returned mark
        all of them are there; until then nothing else may read or write them.
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
        """Copy the arena's slabs from `slab` on to `wanted`, [H_kv, n, tokens of a slab, words of a row]."""
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
