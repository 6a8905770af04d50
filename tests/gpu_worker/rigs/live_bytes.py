"""Counts the bytes of tensors that are alive at one time, with kernels' work left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """peak: the most bytes of what was made within, and is not one of the `known` tensors or a view of one."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_paused:
            self._live = {name: one for name, one in self._live.items() if not one[0].expired()}
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                    storage = tensor.untyped_storage()
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._live.values()))
        return result

    def as_kernel(self, reference: Callable[..., Any]) -> Callable[..., Any]:
        """Return the reference as a kernel in its place: only its results are counted."""

        def kernel(*operands: Any) -> Any:
            self._is_paused = True
            try:
                result = reference(*operands)
            finally:
                self._is_paused = False
            if isinstance(result, Tensor):
                return result.clone()
            fields = {name: getattr(result, name).clone() for name in result.__slots__}
            return type(result)(**fields)

        return kernel
