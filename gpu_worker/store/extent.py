"""What the store holds of a sequence, and what it trains of it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpu_worker.policies.recall import IndexJob
from kv_store.client import IndexSegment


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """An index that is being built: `future` gives the segment of `layer`."""

    layer: int
    job: IndexJob
    future: Future[IndexSegment]


@dataclass(slots=True)
class Extent:
    """Tokens that a sequence may write to the store, those that it surely wrote, and those that it may read.

    shared: the first so many tokens are in slabs of others, and never written. hashes: names of the slabs that its
    prompt fills. slabs: int32 [L, slabs of a layer], as the store gave them.
    """

    reserved: int = 0
    written: int = 0
    sealed: int = 0
    shared: int = 0
    hashes: tuple[bytes, ...] = ()
    slabs: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
