"""A CUDA graph that is given a table of numbers, and has logits for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


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
