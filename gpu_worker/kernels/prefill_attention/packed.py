"""Where the tokens of several prompts lie, packed one prompt behind another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

AttendChunk = Callable[[Tensor, Tensor, int, float], Tensor]


@dataclass(frozen=True, slots=True)
class Packed:
    """num_queries, num_rows: of each prompt; the queries are its last tokens'. query_bounds, row_bounds: int32 [P + 1]
    on the device, where each begins and the last one ends."""

    num_queries: tuple[int, ...]
    num_rows: tuple[int, ...]
    query_bounds: Tensor
    row_bounds: Tensor

    @classmethod
    def of(cls, num_queries: Sequence[int], num_rows: Sequence[int], device: torch.device) -> Packed:
        bounds = [[0, *accumulate(counts)] for counts in (num_queries, num_rows)]
        # From memory that is not pinned the host would wait for all that is queued.
        host = torch.tensor(bounds, dtype=torch.int32, pin_memory=device.type == "cuda")
        query_bounds, row_bounds = host.to(device, non_blocking=True)
        return cls(tuple(num_queries), tuple(num_rows), query_bounds, row_bounds)

    def attend_each(self, attend: AttendChunk, query: Tensor, rows: Tensor, scale: float) -> Tensor:
        """Attention of one prompt after the other, each as a chunk of its own. Arguments as of `attend_prompts`."""
        own_rows = rows.split(self.num_rows, dim=1)
        begins = [total - last for total, last in zip(self.num_rows, self.num_queries, strict=True)]
        of_prompts = zip(query.split(self.num_queries), own_rows, begins, strict=True)
        return torch.cat([attend(own, seen, begin, scale) for own, seen, begin in of_prompts])
