"""Decode steps captured as CUDA graphs, one for each shape of batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_worker.engine.captured import Captured
from gpu_worker.state.batch import Batch, BatchShape

# A captured 32-layer step is some hundred launches; shapes that no batch had for long are captured again.
MAX_GRAPHS = 32
# Nodes of a captured layer, at most.
GRAPH_LAYER_BYTES = 320 << 10


class StepGraphs:
    """Runs a step as it is when its shape is new, captures it when the shape comes again, then replays it.

    All graphs share one pool of memory: only one runs at a time, and a step's results are read before the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.captured: OrderedDict[BatchShape, Captured] = OrderedDict()
        self._seen: set[BatchShape] = set()
        self._state: tuple[object, ...] = ()
        self._memory_pool: Any = None

    def run(self, batch: Batch, state: tuple[object, ...], forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [rows, vocab], valid until the next run. forward: the step from its table on the device.

        state: objects whose memory addresses captured steps hold; with other objects all captured steps are void.
        """
        if len(state) != len(self._state) or any(a is not b for a, b in zip(state, self._state, strict=True)):
            self.captured.clear()
            # Buffers and kernels that are made when first needed may have to be made again.
            self._seen.clear()
            # PyTorch ends a pool with the last graph that uses it.
            self._memory_pool = None
            self._state = state
        captured = self.captured.get(batch.shape)
        if captured is None:
            if batch.shape not in self._seen:
                # The first time also compiles kernels, which must not happen under capture.
                self._seen.add(batch.shape)
                return forward(torch.tensor(batch.table, device=self._device))
            captured = self._capture(batch, forward)
        self.captured.move_to_end(batch.shape)
        return captured.replay(batch.table)

    def _capture(self, batch: Batch, forward: Callable[[Tensor], Tensor]) -> Captured:
        if self._memory_pool is None:
            self._memory_pool = torch.cuda.graph_pool_handle()
        captured = Captured.of(batch.table, self._device, forward, self._memory_pool)
        self.captured[batch.shape] = captured
        while len(self.captured) > MAX_GRAPHS:
            self.captured.popitem(last=False)
        return captured
