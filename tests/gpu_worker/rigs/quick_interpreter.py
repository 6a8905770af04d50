"""Triton's interpreter without work whose result nobody reads: a third of what kernels cost in it.

Nearly all of its time goes to objects that tell type and shape of small arrays, not to the arrays. Types of one shape
share what describes it, and operators of operands that Triton would not have converted go to numpy at once.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

NUMPY_DTYPES = {
    kind.name: interpreter._get_np_dtype(kind)
    for kind in (
        *(tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64),
        *(tl.float8e4nv, tl.float16, tl.bfloat16, tl.float32, tl.float64),
    )
}
# Types whose sums, products and so on have them too.
INTEGERS = frozenset(("int32", "int64", "uint32", "uint64"))
NUMBERS = INTEGERS | {"fp32"}
OPERATORS = {
    **dict.fromkeys(("__add__", "__sub__", "__mul__"), NUMBERS),
    **dict.fromkeys(("__and__", "__or__", "__xor__"), INTEGERS | {"int1"}),
    **dict.fromkeys(("__lshift__", "__rshift__"), INTEGERS),
}
COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")

Operator = Callable[[core.tensor, Any], core.tensor]


def hasten() -> None:
    """For this process, before its first kernel."""
    # Sums are computed again in 64 bits for an assertion, which without `debug` is left out.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = numpy_dtype
    interpreter._convert_float = quick_conversion(interpreter._convert_float)
    core.block_type.__init__ = describe_block
    core.tensor.__init__ = describe_tensor
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = quick_broadcast(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = quick_check(semantic.binary_op_type_checking_impl)
    # What stands here as `tl` and `core` gets the interpreter's operators once, and not at every call of a function.
    nothing_to_restore = type(interpreter._patch_lang(hasten))()
    interpreter._patch_lang = lambda _function: nothing_to_restore
    tensor = core.tensor
    for name, kinds in OPERATORS.items():
        setattr(tensor, name, quick_operator(getattr(tensor, name), getattr(operator, name), kinds, None))
    for name in COMPARISONS:
        setattr(
            tensor, name, quick_operator(getattr(tensor, name), getattr(operator, name), NUMBERS, tl.int1)
        )
    tensor.__add__ = quick_addresses(tensor.__add__)
    tensor.__getitem__ = quick_index(tensor.__getitem__)


def numpy_dtype(kind: core.dtype) -> np.dtype[Any]:
    """As Triton's own, which makes the table anew at each call."""
    scalar = kind.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else NUMPY_DTYPES[scalar.name]


class Shape:
    """The parts that all types and all tensors of one shape share."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.of_type, self.text = core.tuple(sizes), str(sizes)
        self.of_tensor = core.tuple([core.constexpr(size) for size in sizes])
        self.numel = core.validate_block_shape(sizes)
        self.numel_of_tensor = core.constexpr(self.numel)


SHAPES: dict[tuple[int, ...], Shape] = {}
SCALAR = Shape(())


def describe_block(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    known = SHAPES.get(sizes)
    if known is None:
        known = SHAPES[sizes] = Shape(sizes)
    self.element_ty, self.shape, self.numel, self.known = element_ty, known.of_type, known.numel, known
    self.name = f"<{known.text}, {element_ty.name}>"


def describe_tensor(self: core.tensor, handle: TensorHandle, type: core.dtype) -> None:
    known = type.known if isinstance(type, core.block_type) else SCALAR
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = known.of_tensor, known.numel_of_tensor


def tensor_of(data: np.ndarray, kind: core.dtype, is_block: bool) -> core.tensor:
    return core.tensor(TensorHandle(data, kind), core.block_type(kind, data.shape) if is_block else kind)


def quick_broadcast(usual: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(self: Any, left: core.tensor, right: core.tensor) -> tuple[core.tensor, core.tensor]:
        return (left, right) if left.shape is right.shape else usual(self, left, right)

    return broadcast


def quick_check(usual: Callable[..., Any]) -> Callable[..., Any]:
    def check(
        self: Any, left: Any, right: Any, *rules: bool, **named: bool
    ) -> tuple[core.tensor, core.tensor]:
        if (
            isinstance(left, core.tensor)
            and isinstance(right, core.tensor)
            and left.dtype.name in NUMBERS
            and left.dtype.name == right.dtype.name
        ):
            return self.broadcast_impl_value(left, right)
        return usual(self, left, right, *rules, **named)

    return check


def quick_operator(
    usual: Operator, operation: Callable[..., Any], kinds: frozenset[str], result: core.dtype | None
) -> Operator:
    """result: of a comparison, else the operands' own."""

    def operate(self: core.tensor, other: Any) -> core.tensor:
        kind = self.dtype.name
        if kind not in kinds:
            return usual(self, other)
        is_block = self.type.is_block()
        if isinstance(other, core.tensor):
            if other.dtype.name != kind:
                return usual(self, other)
            right, is_block = other.handle.data, is_block or other.type.is_block()
        else:
            constant = other.value if isinstance(other, core.constexpr) else other
            if kind not in NUMBERS or type(constant) is not int or not 0 <= constant < 2**31:
                return usual(self, other)
            right = NUMPY_DTYPES[kind].type(constant)
        return tensor_of(operation(self.handle.data, right), result or self.dtype, is_block)

    return operate


def quick_addresses(usual: Operator) -> Operator:
    """Pointers and offsets."""

    def add(self: core.tensor, other: Any) -> core.tensor:
        kind = self.dtype
        if kind.is_ptr() and isinstance(other, core.tensor) and other.dtype.name in INTEGERS:
            size = np.uint64(max(1, kind.element_ty.primitive_bitwidth // 8))
            places = self.handle.data + size * other.handle.data.astype(np.uint64)
            return tensor_of(places, kind, self.type.is_block() or other.type.is_block())
        return usual(self, other)

    return add


def quick_index(usual: Operator) -> Operator:
    def index(self: core.tensor, slices: Any) -> core.tensor:
        is_plain = isinstance(slices, tuple) and all(each is None or each == slice(None) for each in slices)
        if not is_plain or not self.type.is_block():
            return usual(self, slices)
        return tensor_of(self.handle.data[slices], self.dtype, True)

    return index


def quick_conversion(usual: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """bfloat16 is the upper half of float32; what is narrowed is cut off. Triton's own conversion to e4m3 loses the
    carry of what is rounded up to a power of two: PyTorch's is taken."""

    def convert(data: np.ndarray, source: core.dtype, target: core.dtype, rounding: Any) -> np.ndarray:
        if rounding is None and (source.name, target.name) == ("bf16", "fp32"):
            return data.astype(np.uint32) << np.uint32(16)
        if rounding is None and (source.name, target.name) == ("fp32", "bf16"):
            return (np.ascontiguousarray(data).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        if target.name == "fp8e4nv" and source.name == "fp32":
            wide = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return usual(data, source, target, rounding)

    return convert
