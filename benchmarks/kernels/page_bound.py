"""Quest's upper bound of a page; it must read the least and largest value of every channel and page once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, num_bytes_of, relative_error

# Quest's own
PAGE_TOKENS = 16


def cases(setting: Setting) -> Iterator[KernelCase]:
    page_bound, reference = setting.both("policies.quest.page_bound", "page_bound")
    shape = setting.shape
    for workload in setting.workloads:
        batch, num_pages = workload.batch, max(1, workload.context // PAGE_TOKENS)

        def make(batch: int = batch, num_pages: int = num_pages) -> Operands:
            query = setting.normal(batch, shape.num_heads, shape.head_dim)
            extremes = setting.normal(2, batch, shape.num_kv_heads, num_pages, shape.head_dim)
            key_min, key_max = extremes.amin(0), extremes.amax(0)
            begin = torch.zeros(batch, dtype=torch.int64, device=setting.device)
            end = torch.full_like(begin, num_pages)
            seats = torch.arange(batch, device=setting.device)
            wanted = (query, key_min, key_max, seats, begin, end, num_pages)
            return Operands(
                lambda: page_bound(*wanted),
                error=lambda: relative_error(page_bound(*wanted), reference(*wanted)),
            )

        rows = batch * shape.num_kv_heads
        page = num_bytes_of(setting.empty(2, shape.head_dim)) + 4
        yield KernelCase("page_bound", f"{rows} x {num_pages} pages", rows * num_pages * page, make)
