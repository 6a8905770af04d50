"""The gate of an MLP: two rows in, one out a token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.kernels.base import (
    KernelCase,
    Operands,
    Setting,
    num_bytes_of,
    relative_error,
    token_counts,
)


def cases(setting: Setting) -> Iterator[KernelCase]:
    silu_mul, reference = setting.both("kernels.silu_mul", "silu_mul")
    width = setting.shape.intermediate_size
    for count in token_counts(setting):

        def make(count: int = count) -> Operands:
            gate_up = setting.normal(count, 2 * width)
            gate, up = gate_up.chunk(2, -1)

            def rival() -> torch.Tensor:
                return F.silu(gate) * up

            return Operands(
                lambda: silu_mul(gate_up),
                rival,
                lambda: relative_error(silu_mul(gate_up), reference(gate_up)),
            )

        num_bytes = 3 * num_bytes_of(setting.empty(count, width))
        yield KernelCase("silu_mul", f"{count} x {width}", num_bytes, make, "torch silu, mul")
