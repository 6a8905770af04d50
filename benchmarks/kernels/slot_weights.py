"""Weights of the slots that H2O keeps, at every step; it must read their keys once and write a weight a slot."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernels.attend_blocks import filled_blocks
from benchmarks.kernels.base import KernelCase, Operands, Setting, relative_error

# of the context, one in so many
KEPT_SHARE = 5


def cases(setting: Setting) -> Iterator[KernelCase]:
    weigh, reference = setting.both("kernels.slot_weights", "slot_weights")
    shape = setting.shape
    for workload in setting.workloads:
        batch, length = workload.batch, max(1, workload.context // KEPT_SHARE)

        def make(batch: int = batch, length: int = length) -> Operands:
            wanted = filled_blocks(setting, batch, length)
            return Operands(
                lambda: weigh(*wanted),
                lambda: reference(*wanted),
                lambda: relative_error(weigh(*wanted), reference(*wanted)),
            )

        rows = batch * shape.num_kv_heads
        num_bytes = rows * length * (shape.head_dim * setting.dtype.itemsize + 4)
        yield KernelCase("slot_weights", f"{rows} x {length}", num_bytes, make, "the same in PyTorch")
