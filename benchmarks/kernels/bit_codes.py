"""Two bits a coordinate of a prompt's keys; keys once in, codes and a scale out."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernels.base import KernelCase, Operands, Setting, contexts, mismatch
from benchmarks.kernels.bit_operands import Coded, code_bytes


def cases(setting: Setting) -> Iterator[KernelCase]:
    code, reference = setting.both("policies.bitkeys.key_bits", "code_prompt")
    shape = setting.shape
    num_heads = shape.num_kv_heads
    for context in contexts(setting):

        def make(context: int = context) -> Operands:
            keys = setting.normal(num_heads, context, shape.head_dim)
            into = Coded.random(setting, num_heads, num_positions=context)

            def error() -> float:
                found, wanted = into.clone(), into.clone()
                for each, one in (code, found), (reference, wanted):
                    each(keys, one.means, one.rotation, one.codes, one.scales)
                return mismatch(found.codes, wanted.codes)

            return Operands(
                lambda: code(keys, into.means, into.rotation, into.codes, into.scales),
                lambda: reference(keys, into.means, into.rotation, into.codes, into.scales),
                error,
            )

        num_bytes = context * (shape.head_dim * setting.dtype.itemsize + code_bytes(setting))
        label = f"{num_heads} x {context}"
        yield KernelCase("bit_codes", label, num_heads * num_bytes, make, "the same in PyTorch")
