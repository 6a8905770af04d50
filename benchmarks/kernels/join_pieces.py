"""Attention over a chunk's pieces of the past, joined: every output is read and the joined one written."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, num_bytes_of, relative_error

CHUNK = 8192
NUM_PIECES = (2, 4, 8)


def cases(setting: Setting) -> Iterator[KernelCase]:
    join_pieces, reference = setting.both("kernels.join_pieces", "join_pieces")
    shape = setting.shape
    for count in NUM_PIECES:

        def make(count: int = count) -> Operands:
            log_sums = setting.normal(count, shape.num_heads, CHUNK).float()
            outputs = [setting.normal(CHUNK, shape.num_heads, shape.head_dim) for _ in range(count)]

            def rival() -> torch.Tensor:
                joined, log_sum = outputs[0].float(), log_sums[0].T[..., None]
                for output, other in zip(outputs[1:], log_sums[1:], strict=True):
                    joined.lerp_(output.float(), torch.sigmoid(other.T[..., None] - log_sum))
                    log_sum = torch.logaddexp(log_sum, other.T[..., None])
                return joined.to(outputs[0].dtype)

            return Operands(
                lambda: join_pieces(log_sums, *outputs),
                rival,
                lambda: relative_error(join_pieces(log_sums, *outputs), reference(log_sums, *outputs)),
            )

        num_bytes = (count + 1) * num_bytes_of(setting.empty(CHUNK, shape.num_heads, shape.head_dim))
        yield KernelCase(
            "join_pieces", f"{count} x {CHUNK}", num_bytes, make, "torch lerp, one after another"
        )
