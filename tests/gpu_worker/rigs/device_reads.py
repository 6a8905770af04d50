"""Sees where a tensor's content reaches the host: on a GPU the host would wait there."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READS_DATA = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten.unique_dim,
    aten._unique2,
    aten.equal,
    aten.repeat_interleave,
    # What a host's list becomes: its copy to a device waits for it.
    aten.lift_fresh,
    aten.lift_fresh_copy,
}


class DeviceReads(TorchDispatchMode):
    """found: what was read and by whom, in order; not in references, in whose place a GPU has kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        # A tensor of the host becomes a list without any operation.
        self._lists = patch.object(Tensor, "tolist", self._tolist())

    def __enter__(self) -> DeviceReads:
        self._lists.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_mask = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if func.overloadpacket in READS_DATA or is_mask:
            self._note(str(func))
        return func(*args, **(kwargs or {}))

    def _tolist(self) -> Any:
        tolist = Tensor.tolist

        def noted(tensor: Tensor) -> Any:
            self._note("tolist")
            return tolist(tensor)

        return noted

    def _note(self, what: str) -> None:
        where = _callers(sys._getframe())
        if not any(name.endswith("reference.py") for name in where):
            self.found.append(f"{what} in {where[:6]}")


def _callers(frame: FrameType | None) -> list[str]:
    names = []
    while frame is not None:
        if "gpu_worker" in frame.f_code.co_filename:
            names.append(f"{frame.f_code.co_name} {frame.f_code.co_filename}")
        frame = frame.f_back
    return names
