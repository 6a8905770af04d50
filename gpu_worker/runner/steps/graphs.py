"""Work captured as CUDA graphs: one graph for a table of numbers, and decode steps, one for each shape of batch."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import unowned
from gpu_worker.state.batch import Batch, BatchShape


@dataclass(frozen=True, slots=True)
class Captured:
    """graph: reads `table` and writes `logits`. staged: pinned memory that the host fills through `filled`, a view of
    it. taken: the mark from which the host may fill it again."""

    graph: torch.cuda.CUDAGraph
    table: Tensor
    staged: Tensor
    filled: npt.NDArray[np.int64]
    logits: Tensor
    taken: torch.cuda.Event

    @classmethod
    def of(
        cls,
        table: npt.NDArray[np.int64],
        device: torch.device,
        forward: Callable[[Tensor], Tensor],
        pool: Any,
    ) -> Captured:
        """Capture what `forward` does with the table on the device, and has done once before. pool: of memory, shared
        by graphs of which one runs at a time. Nothing is computed yet. Raises RuntimeError."""
        on_device = torch.tensor(table, device=device)
        graph = torch.cuda.CUDAGraph()
        with (
            _without_collection(),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            logits = forward(on_device)
        # Its memory is the next graph's too: else each of them would keep a full batch's.
        logits = unowned(logits)
        staged = torch.tensor(table).pin_memory()
        return cls(graph, on_device, staged, staged.numpy(), logits, torch.cuda.Event())

    def replay(
        self, table: npt.NDArray[np.int64], complete: Callable[[Tensor], None] = lambda table: None
    ) -> Tensor:
        """The logits, valid until a graph of its pool runs again. complete: fills in what of the table only the device
        knows."""
        self.taken.synchronize()
        self.filled[:] = table
        self.table.copy_(self.staged, non_blocking=True)
        self.taken.record()
        complete(self.table)
        self.graph.replay()
        return self.logits


@contextmanager
def _without_collection() -> Iterator[None]:
    """Hold Python's garbage collector off: a graph, event or module that it ends during a capture voids the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


logger = logging.getLogger(__name__)

# A captured 32-layer step is some hundred launches; shapes that no batch had for long are captured again.
MAX_GRAPHS = 40
# Nodes of a captured layer, at most.
GRAPH_LAYER_BYTES = 320 << 10
# Of the graphs, shapes that were prepared: these stay.
MAX_PREPARED = 32
# Steps that a shape has in a wider one before it is captured itself: that stops all streams for as long as some steps
# take, to save a part of each later one.
MANY_STEPS = 2000
# Between two such stops, at least.
PAUSE_SECONDS = 1.0


class StepGraphs:
    """Runs a step as it is when its shape is new, captures it when the shape comes again, then replays it. A new shape
    goes into a wider one that was prepared, with padding, where there is any.

    All graphs share one pool of memory: only one runs at a time, and a step's results are read before the next.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._clock = clock
        self.captured: OrderedDict[BatchShape, Captured] = OrderedDict()
        self.prepared: set[BatchShape] = set()
        self._seen: set[BatchShape] = set()
        # Of other shapes, the prepared one that serves them, and their steps in it.
        self._wider: dict[BatchShape, BatchShape | None] = {}
        self._num_steps: Counter[BatchShape] = Counter()
        self._last_stop = -PAUSE_SECONDS
        self._state: tuple[object, ...] = ()
        self._memory_pool: Any = None

    def fit(self, batch: Batch, state: tuple[object, ...]) -> Batch:
        """The batch as it is to be run: in a wider shape that was prepared; or as it is, where there is none or its own
        is worth to be captured. state: as of `run`."""
        self._use(state)
        if batch.shape in self.captured:
            return batch
        if batch.shape not in self._wider:
            wider = [shape for shape in self.prepared if shape.covers(batch.shape)]
            self._wider[batch.shape] = min(wider, key=lambda shape: shape.size, default=None)
        if (chosen := self._wider[batch.shape]) is None:
            return batch
        self._num_steps[batch.shape] += 1
        now = self._clock()
        if self._num_steps[batch.shape] > MANY_STEPS and now - self._last_stop >= PAUSE_SECONDS:
            self._last_stop = now
            return batch
        return batch.padded_to(chosen)

    def prepare(self, batch: Batch, state: tuple[object, ...], forward: Callable[[Tensor], Tensor]) -> None:
        """Capture a shape that stays captured, unless too many do: `batch` is run twice. Arguments as of `run`."""
        self._use(state)
        if len(self.prepared) >= MAX_PREPARED:
            return
        for _ in range(1 if batch.shape in self.captured else 2):
            self.run(batch, state, forward)
        self.prepared.add(batch.shape)
        self._wider.clear()

    def run(
        self,
        batch: Batch,
        state: tuple[object, ...],
        forward: Callable[[Tensor], Tensor],
        complete: Callable[[Tensor], None] = lambda table: None,
    ) -> Tensor:
        """Return logits [rows, vocab], valid until the next run.

        forward: the step from its table on the device.
        complete: fills in what of the table only the device knows.
        state: objects with memory addresses that captured steps hold; with other objects all captured steps are void.
        """
        self._use(state)
        captured = self.captured.get(batch.shape)
        if captured is None:
            if batch.shape not in self._seen:
                # The first time also compiles kernels, which must not happen under capture.
                self._seen.add(batch.shape)
                logger.debug("a step of a new shape: %s", batch.shape)
                table = torch.tensor(batch.table, device=self._device)
                complete(table)
                return forward(table)
            captured = self._capture(batch, forward)
        self.captured.move_to_end(batch.shape)
        return captured.replay(batch.table, complete)

    def _use(self, state: tuple[object, ...]) -> None:
        if len(state) == len(self._state) and all(a is b for a, b in zip(state, self._state, strict=True)):
            return
        self.captured.clear()
        self.prepared.clear()
        # Buffers and kernels that are made when first needed may have to be made again.
        self._seen.clear()
        self._num_steps.clear()
        self._wider.clear()
        # PyTorch ends a pool with the last graph that uses it.
        self._memory_pool = None
        self._state = state

    def _capture(self, batch: Batch, forward: Callable[[Tensor], Tensor]) -> Captured:
        begun = time.monotonic()
        if self._memory_pool is None:
            self._memory_pool = torch.cuda.graph_pool_handle()
        captured = Captured.of(batch.table, self._device, forward, self._memory_pool)
        self.captured[batch.shape] = captured
        while len(self.captured) > MAX_GRAPHS:
            oldest = next(shape for shape in self.captured if shape not in self.prepared)
            del self.captured[oldest]
            del self._num_steps[oldest]
        logger.debug("captured %s in %.0f ms", batch.shape, 1e3 * (time.monotonic() - begun))
        return captured
