"""Two bits a coordinate of the tokens that leave the window, of all layers at once; keys and means once in."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import KernelCase, Operands, Setting, mismatch
from benchmarks.kernels.bit_operands import Coded, code_bytes

# what is not written is not read either: a short index does
NUM_POSITIONS = 1024


def cases(setting: Setting) -> Iterator[KernelCase]:
    code, reference = setting.both("policies.bitkeys.key_bits", "code_leaving")
    shape, device = setting.shape, setting.device
    for batch in sorted({workload.batch for workload in setting.workloads}):
        heads = (batch, shape.num_layers, shape.num_kv_heads)

        def make(batch: int = batch, heads: tuple[int, int, int] = heads) -> Operands:
            keys = setting.normal(*heads, shape.head_dim)
            into = Coded.random(setting, *heads, num_positions=NUM_POSITIONS)
            seats = torch.arange(batch, device=device)
            positions = torch.full((batch,), NUM_POSITIONS // 2, device=device)

            def error() -> float:
                found, wanted = into.clone(), into.clone()
                for each, one in (code, found), (reference, wanted):
                    each(keys, one.means, one.rotation, one.codes, one.scales, seats, positions)
                place = NUM_POSITIONS // 2
                return mismatch(found.codes[..., place, :], wanted.codes[..., place, :])

            return Operands(
                lambda: code(keys, into.means, into.rotation, into.codes, into.scales, seats, positions),
                error=error,
            )

        key_bytes = shape.head_dim * (setting.dtype.itemsize + torch.float32.itemsize)
        num_bytes = batch * shape.num_layers * shape.num_kv_heads * (key_bytes + code_bytes(setting))
        yield KernelCase("bit_append", f"{batch} tokens of {shape.num_layers} layers", num_bytes, make)
