"""Which implementation of a kernel runs: the reference on a CPU, Triton's on a GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from torch import Tensor

Params = ParamSpec("Params")
Result = TypeVar("Result")


def by_device(reference: Callable[Params, Result], module: str = "kernel") -> Callable[Params, Result]:
    """A function that calls `reference` where its first argument lies on the CPU, else what `module`, in the
    reference's package, has by that name.

    Both have the same signature. The first argument is a tensor, or a record of tensors with `device`. The module,
    which needs Triton, is imported at the first call on a GPU: a CPU needs no Triton.
    """

    beside = f"{reference.__module__.rpartition('.')[0]}.{module}".lstrip(".")

    @functools.wraps(reference)
    def chosen(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        first = cast(Tensor, args[0])
        if first.device.type != "cuda":
            return reference(*args, **kwargs)
        return cast(Result, _load(beside, reference.__name__)(*args, **kwargs))

    return chosen


@functools.cache
def _load(module: str, name: str) -> Callable[..., Any]:
    return cast(Callable[..., Any], getattr(importlib.import_module(module), name))
