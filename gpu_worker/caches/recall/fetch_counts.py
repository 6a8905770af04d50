"""How many rows the device fetched by itself, which the host learns after the step."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.device import Mark, to_host
from gpu_worker.policies.base import CacheShape
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader


class FetchCounts:
    """rows: int64 [seats], of each seat since the start; the device adds to it."""

    def __init__(self, shape: CacheShape, offloader: Offloader) -> None:
        with torch.inference_mode(False):
            self.rows = torch.zeros(shape.num_seats, dtype=torch.int64, device=shape.device)
        self._offloader = offloader
        # Those that meters have already, and those on their way to the host.
        self._taken = [0] * shape.num_seats
        self._copied: tuple[Tensor, Mark] | None = None

    def copy(self, sequences: list[Sequence]) -> None:
        """Bring the counts to the host, behind a step of these sequences."""
        if any(sequence.can_miss for sequence in sequences):
            self._copied = to_host(self.rows), Mark(self.rows.device)

    def take(self, sequences: list[Sequence], wait: bool = True) -> None:
        """Add the rows of the steps so far to the meters of these, all sequences that offload. wait: for the last step;
        else nothing is added before the device is done with it.

        Call it before a seat of theirs is given to another sequence.
        """
        if self._copied is None:
            return
        counts, copied = self._copied
        if wait:
            copied.wait()
        if copied.is_reached:
            self._copied = None
            self._add(sequences, counts.tolist())

    def _add(self, sequences: list[Sequence], counts: list[int]) -> None:
        for sequence in sequences:
            if num_rows := counts[sequence.seat] - self._taken[sequence.seat]:
                self._offloader.host.count(sequence, num_rows)
        self._taken = counts
