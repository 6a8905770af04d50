"""Triton's interpreter without work whose result nobody reads: half of what kernels cost in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def hasten() -> None:
    """For this process, before its first kernel."""
    # Sums are computed again in 64 bits for an assertion, which without `debug` is left out.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = numpy_dtype
    # What stands here as `tl` and `core` gets the interpreter's operators once, and not at every call of a function.
    nothing_to_restore = type(interpreter._patch_lang(hasten))()
    interpreter._patch_lang = lambda _function: nothing_to_restore


NUMPY_DTYPES = {
    kind.name: interpreter._get_np_dtype(kind)
    for kind in (
        *(tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64),
        *(tl.float16, tl.bfloat16, tl.float32, tl.float64),
    )
}


def numpy_dtype(kind: core.dtype) -> np.dtype[Any]:
    """As Triton's own, which makes the table anew at each call."""
    scalar = kind.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else NUMPY_DTYPES[scalar.name]
