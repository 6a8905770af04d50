"""Residual addition and norm: two rows in, two rows out a token."""

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
    rms_norm, reference = setting.both("kernels.rms_norm", "rms_norm")
    width, eps = setting.shape.hidden_size, setting.shape.rms_norm_eps
    for count in token_counts(setting):

        def make(count: int = count) -> Operands:
            hidden, added = setting.normal(count, width), setting.normal(count, width)
            weight = setting.normal(width)

            def error() -> float:
                pairs = zip(
                    rms_norm(hidden, weight, eps, added), reference(hidden, weight, eps, added), strict=True
                )
                return max(relative_error(found, wanted) for found, wanted in pairs)

            def rival() -> torch.Tensor:
                return F.rms_norm(hidden + added, (width,), weight, eps)

            return Operands(lambda: rms_norm(hidden, weight, eps, added), rival, error)

        num_bytes = 4 * num_bytes_of(setting.empty(count, width))
        yield KernelCase("rms_norm", f"{count} x {width}", num_bytes, make, "torch add, rms_norm")
