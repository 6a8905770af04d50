"""Copies of layers between the device and the arena's slabs, while another layer is computed."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import Mark, SideStream
from gpu_worker.store.arena import ArenaView

# Bytes of staged rows in slab order: enough for one copy to be long, few next to those of a layer.
STAGE_BYTES = 64 << 20


class LayerCopies:
    """Writes prefilled layers to the arena, and reads layers of a known prefix. Each way has a side stream, and a stage
    on the device with rows in the order of slabs, of which runs are copied.

    The copies need only the bus, and reordering takes a few microseconds for every millisecond of copying.
    """

    def __init__(self, arena: ArenaView, device: torch.device, stage_bytes: int = STAGE_BYTES) -> None:
        self._arena = arena
        self._device = device
        self._per_granule = arena.granule_bytes // arena.layout.slab_bytes
        # A slab is written without the bytes behind its rows, and read with them.
        self._out = _Stage(arena, arena.used_bytes, stage_bytes, device)
        self._in = _Stage(arena, arena.layout.slab_bytes, stage_bytes, device)

    def write(self, rows: Tensor, slabs: npt.NDArray[np.int32]) -> Mark:
        """Start to copy rows [L, H_kv, n, 2d] of some layers into their slabs, [L, >= those of n tokens], which must be
        in `slab_tables`.

        At the mark all of it is in the arena; until then nothing may write to `rows` or read from the slabs.
        """
        num_slabs, most = -(-rows.shape[2] // self._arena.layout.tokens_per_slab), self._out.most
        with self._out.beside.queue():
            begun = Mark(self._device)
            if num_slabs:
                words = rows.view(self._arena.word)
                # Of short prompts many layers are copied at once.
                at_once = max(1, most // num_slabs)
                for first in range(0, len(rows), at_once):
                    some = slice(first, first + at_once)
                    of_layers = words if at_once >= len(rows) else words[some]
                    for begin in range(0, num_slabs, most):
                        end = min(begin + most, num_slabs)
                        self._write_some(of_layers, begin, slabs[some, begin:end])
            return Mark(self._device, begun)

    def wait_for_writes(self) -> None:
        """Let the host wait until nothing is being written any more."""
        self._out.beside.wait()

    def _write_some(self, words: Tensor, begin: int, slabs: npt.NDArray[np.int32]) -> None:
        """Write the slabs of each layer from its `begin` on to the arena's, [L, n slabs].

        words: the rows as words, [L, H_kv, n, words].
        """
        self._put_in_order(words, begin, slabs.shape[1])
        places = slabs.ravel()
        for first, end in contiguous_runs(places, self._out.most, self._per_granule):
            self._write_run(first, end, int(places[first]))

    def _write_run(self, first: int, end: int, slab: int) -> None:
        """Copy the staged slabs [first, end) to the arena's slabs from `slab` on."""
        host, slab_bytes, used = self._arena.host, self._arena.layout.slab_bytes, self._arena.used_bytes
        # Where slabs are full their rows are one copy.
        at_once = end - first if used == slab_bytes else 1
        for offset in range(0, end - first, at_once):
            place = (slab + offset) * slab_bytes
            staged = self._out.bytes[(first + offset) * used : (first + offset + at_once) * used]
            host[place : place + at_once * used].copy_(staged, non_blocking=True)

    def _put_in_order(self, words: Tensor, begin: int, num_slabs: int) -> None:
        """Stage so many slabs of each layer as the arena holds them, zeros behind the last token."""
        num_layers, per_slab = len(words), self._arena.layout.tokens_per_slab
        if begin or num_slabs * per_slab < words.shape[2]:
            words = words[:, :, begin * per_slab : (begin + num_slabs) * per_slab]
        slabs = self._out.rows[: num_layers * num_slabs].unflatten(0, (num_layers, num_slabs))
        num_full, num_rest = divmod(words.shape[2], per_slab)
        if num_full:
            full = words[:, :, : num_full * per_slab].unflatten(2, (num_full, per_slab))
            slabs[:, :num_full] = full.transpose(1, 2)
        if num_rest:
            last = slabs[:, num_full]
            last.zero_()
            last[:, :, :num_rest].copy_(words[:, :, num_full * per_slab :] if num_full else words)

    def read(self, slabs: npt.NDArray[np.int32], rows: Tensor, free: Mark | None = None) -> Mark:
        """Start to fill rows [H_kv, n, 2d] with n tokens, which fill these slabs; they must be in `slab_tables`.

        free: mark from which on rows may be written, while the work that is queued by now runs. At the returned mark
        all of them are there; until then nothing else may read or write them.
        """
        with self._in.beside.queue():
            if free is not None:
                free.hold()
            # Few operations: a layer is read in less time than many of them take the host.
            wanted = rows.view(self._arena.word).unflatten(1, (-1, self._arena.layout.tokens_per_slab))
            for begin, end in contiguous_runs(slabs, self._in.most, self._per_granule):
                self._read_run(wanted[:, begin:end], int(slabs[begin]))
            return Mark(self._device)

    def _read_run(self, wanted: Tensor, slab: int) -> None:
        """Copy the arena's slabs from `slab` on to `wanted`, [H_kv, n, tokens of a slab, words of a row]."""
        num_slabs, slab_bytes = wanted.shape[1], self._arena.layout.slab_bytes
        place = self._arena.host[slab * slab_bytes : (slab + num_slabs) * slab_bytes]
        self._in.bytes[: num_slabs * slab_bytes].copy_(place, non_blocking=True)
        wanted.copy_(self._in.rows[:num_slabs].transpose(0, 1))


class _Stage:
    """Memory of the device for slabs on their way, allocated at the first use, and the side stream of their copies.

    most: slabs that it holds. bytes: uint8 [most x slab_bytes]. rows: the same without what lies behind a slab's rows,
    [most, H_kv, tokens of a slab, words of a row].
    """

    def __init__(self, arena: ArenaView, slab_bytes: int, stage_bytes: int, device: torch.device) -> None:
        self.most = max(1, stage_bytes // slab_bytes)
        self.beside = SideStream(device)
        self._arena = arena
        self._num_bytes = self.most * slab_bytes
        self._device = device

    @cached_property
    def bytes(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)

    @cached_property
    def rows(self) -> Tensor:
        arena = self._arena
        with torch.inference_mode(False):
            used = self.bytes.view(self.most, -1)[:, : arena.used_bytes].view(arena.word)
            return used.unflatten(1, (arena.num_kv_heads, arena.layout.tokens_per_slab, -1))


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
