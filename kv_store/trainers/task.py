"""One training task: keys read from the arena, arrays written into the index segment."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest
from kv_store.client.indexes import ArrayRef, IndexParams
from kv_store.client.layout import Layout, SlabGeometry
from kv_store.index import ArenaKeys, FitOptions, make_index


@dataclass(frozen=True, slots=True)
class TrainTask:
    """Heads of one layer, offsets only. `slab_ids` are the layer's slabs that hold the tokens; the first `skip` tokens
    are not used. heads: (first, end); `arrays` are of all heads."""

    layout: Layout
    slab_bytes: int
    slab_ids: tuple[int, ...]
    skip: int
    num_tokens: int
    heads: tuple[int, int]
    params: IndexParams
    options: FitOptions
    arrays: tuple[ArrayRef, ...]


@dataclass(frozen=True, slots=True)
class TrainOutcome:
    """Seconds of one CPU, those of them within iterations, and iterations made by the head that made most."""

    seconds: float
    iterations: int
    iterating_seconds: float = 0.0

    @classmethod
    def over(cls, parts: Sequence[TrainOutcome]) -> TrainOutcome:
        """Sum up the outcomes of heads that were trained apart."""
        return cls(
            sum(part.seconds for part in parts),
            max((part.iterations for part in parts), default=0),
            sum(part.iterating_seconds for part in parts),
        )


def view_bytes(arena: npt.NDArray[np.uint8], ref: ArrayRef) -> npt.NDArray[np.uint8]:
    """The bytes of the array that `ref` names, uint8 [num_bytes], without a copy."""
    return arena[ref.offset : ref.offset + ref.num_bytes]


def view_array(arena: npt.NDArray[np.uint8], ref: ArrayRef) -> npt.NDArray:
    """The array that `ref` names, without a copy. Raises InvalidStoreRequest when it leaves the arena."""
    dtype = np.dtype(ref.dtype)
    expected = math.prod(ref.shape) * dtype.itemsize
    if ref.num_bytes != expected or ref.offset < 0 or ref.offset > arena.size - ref.num_bytes:
        raise InvalidStoreRequest(f"array {ref.name!r} does not lie within the arena")
    return view_bytes(arena, ref).view(dtype).reshape(ref.shape)


def run_task(arena: npt.NDArray[np.uint8], task: TrainTask) -> TrainOutcome:
    """Fit the task's heads and write their arrays. Raises InvalidStoreRequest when a key is not finite."""
    start = time.perf_counter()
    index = make_index(task.params)
    slabs = SlabGeometry(task.layout, task.slab_bytes).rows(arena)
    slab_ids = np.array(task.slab_ids, np.int64)
    outputs = [view_array(arena, ref) for ref in task.arrays]
    most, iterating_seconds = 0, 0.0
    for head in range(*task.heads):
        keys = ArenaKeys(slabs, task.layout.row_format, slab_ids, head, task.skip, task.num_tokens)
        fit = index.fit_head(keys, task.options)
        for output, array in zip(outputs, fit.arrays, strict=True):
            output[head] = array
        most = max(most, fit.iterations)
        iterating_seconds += fit.iterating_seconds
    return TrainOutcome(time.perf_counter() - start, most, iterating_seconds)


class TrainerPool(ABC):
    """Runs tasks on a fixed number of trainers, each with one CPU and one FAISS thread."""

    @abstractmethod
    def submit(self, task: TrainTask) -> Future[TrainOutcome]:
        """Queue a task. The future raises InvalidStoreRequest for keys that are not finite, else TrainingFailed."""

    @abstractmethod
    def close(self) -> None:
        """Stop the trainers; unfinished futures fail."""
