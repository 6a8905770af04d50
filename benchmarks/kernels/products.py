"""Products with packed matrices, as a layer of the model computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.base import Setting, tokens
from benchmarks.kernels.operation import SAME, Operation, Rival, Sized
from gpu_worker.kernels.packed_matmul.reference import packed_matmul
from gpu_worker.layers import Holding, Numbers, Target
from gpu_worker.layers.packed import ROWS_OF_E4M3, SCALED_CAPABILITY, PackedWeights, ScaledRows

PACKAGE = "kernels.packed_matmul"
# Rows of the inputs: of decode steps, and of a chunk of a prompt.
ROWS = (1, 8, 24, 64, 8192)
GROUP = 128
Product = tuple[str, int, int, int]


def products(s: Setting) -> Iterator[Product]:
    """Name, inputs, outputs and columns of every product of a layer."""
    shape = s.shape
    heads, hidden, width = shape.num_heads * s.dim, shape.hidden_size, shape.intermediate_size
    sizes = {
        "qkv": (heads + 2 * s.heads * s.dim, hidden),
        "o": (hidden, heads),
        "gate_up": (2 * width, hidden),
        "down": (hidden, width),
    }
    for name, size in sizes.items():
        for count in ROWS:
            yield name, min(count, shape.max_len), *size


def product(s: Setting, case: Product, numbers: Numbers) -> Sized:
    name, count, num_outputs, num_columns = case
    size, target = (num_outputs, num_columns), Target(s.device, s.dtype)

    def make() -> tuple[Any, ...]:
        matrix = matrix_of(numbers, size, target)
        matrix.fill(torch.Generator(s.device).manual_seed(0))
        return s.normal(count, num_columns), matrix

    bits = 4 if numbers is Numbers.INT4 else 8
    scales = 4 * num_outputs * num_columns // GROUP if numbers is Numbers.INT4 else 4 * num_outputs
    num_bytes = num_outputs * num_columns * bits // 8 + scales + count * (num_outputs + num_columns) * s.item
    return Sized(f"{name} {count} x {num_columns} x {num_outputs}", num_bytes, make)


def matrix_of(numbers: Numbers, size: tuple[int, int], target: Target) -> PackedWeights:
    if numbers is Numbers.INT4:
        return PackedWeights(Holding(numbers, min(GROUP, size[1])), size, target)
    is_cuda = target.device.type == "cuda"
    if is_cuda and torch.cuda.get_device_capability(target.device) >= SCALED_CAPABILITY:
        return ScaledRows(size, target)
    return PackedWeights(ROWS_OF_E4M3, size, target)


def torch_product(s: Setting, inputs: Tensor, matrix: PackedWeights) -> Callable[[], object]:
    weight = s.normal(matrix.packed.num_rows, matrix.packed.num_columns)
    return lambda: torch.mm(inputs, weight.t())


def _unpacked(inputs: Tensor, matrix: PackedWeights) -> Tensor:
    return packed_matmul(inputs, matrix.packed)


def _result(run: Callable[..., Any], inputs: Tensor, matrix: PackedWeights) -> Tensor:
    """The layer's product, which the number of inputs chooses, or the definition's."""
    return _unpacked(inputs, matrix) if run is _unpacked else matrix.matmul(inputs)


def quantise_rows(s: Setting, count: int) -> Sized:
    width = s.shape.intermediate_size
    return Sized(f"{count} x {width}", count * width * (s.item + 1), lambda: (s.normal(count, width),))


def _operation(numbers: Numbers) -> Operation:
    return Operation(
        PACKAGE,
        "packed_matmul",
        products,
        partial(product, numbers=numbers),
        rival=Rival("torch.mm, 16 bits", torch_product),
        result=_result,
        reference=_unpacked,
        call=lambda _, inputs, matrix: matrix.matmul(inputs),
    )


OPERATIONS = {
    "product_fp8": _operation(Numbers.E4M3),
    "product_int4": _operation(Numbers.INT4),
    "quantise_rows": Operation("kernels.quantise_rows", "quantise_rows", tokens, quantise_rows, rival=SAME),
}
