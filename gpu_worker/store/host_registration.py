"""Host memory that a GPU may read and write itself, registered with CUDA a granule at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GRANULE_BYTES = 1 << 30


class RegistrationFailed(Exception):
    """CUDA does not register the memory; the text says why."""


class HostRegistration:
    """Granules of one mapping, each registered when something in it is first needed.

    A copy must not cross from one granule into the next: CUDA takes them for separate allocations. register:
    (address, bytes), raises RegistrationFailed. unregister: (address).
    """

    def __init__(
        self,
        mapping: npt.NDArray[np.uint8],
        granule_bytes: int,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
    ) -> None:
        self._mapping = mapping
        self.granule_bytes = granule_bytes
        self._register = register
        self._unregister = unregister
        self._registered: set[int] = set()

    def cover(self, offsets: npt.NDArray[np.int64]) -> None:
        """Let the device reach the granules that these bytes of the mapping lie in. Raises RegistrationFailed."""
        for granule in np.unique(offsets // self.granule_bytes).tolist():
            if granule not in self._registered:
                begin = granule * self.granule_bytes
                num_bytes = min(self.granule_bytes, self._mapping.nbytes - begin)
                self._register(self._mapping.ctypes.data + begin, num_bytes)
                self._registered.add(granule)

    def close(self) -> None:
        """Unregister everything; the device must be done with it, and the mapping must still exist."""
        for granule in self._registered:
            self._unregister(self._mapping.ctypes.data + granule * self.granule_bytes)
        self._registered.clear()


def register_with_cuda(mapping: npt.NDArray[np.uint8], granule_bytes: int) -> HostRegistration:
    """For every CUDA device."""
    runtime = torch.cuda.cudart()

    def register(address: int, num_bytes: int) -> None:
        status = runtime.cudaHostRegister(address, num_bytes, 0)
        if int(status):
            _forget_error()
            reason = runtime.cudaGetErrorString(status)
            raise RegistrationFailed(f"{num_bytes} bytes of host memory cannot be registered: {reason}")

    def unregister(address: int) -> None:
        if int(runtime.cudaHostUnregister(address)):
            _forget_error()

    return HostRegistration(mapping, granule_bytes, register, unregister)


def _forget_error() -> None:
    """CUDA keeps an error until something asks for it: otherwise the next launch would report it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def device_tensor(mapping: npt.NDArray[np.uint8], device: torch.device) -> Tensor:
    """The mapping as a CUDA tensor, uint8 [bytes], which keeps it. Its first byte must be registered, every other by
    the time that it is read or written. Raises RegistrationFailed where the device has another address for it."""
    try:
        found = torch.as_tensor(_DeviceMemory(mapping), device=device)
    except RuntimeError as error:
        raise RegistrationFailed(f"the device does not see registered host memory: {error}") from error
    if found.data_ptr() != mapping.ctypes.data:
        raise RegistrationFailed("the device does not see registered host memory where the host does")
    return found


class _DeviceMemory:
    """An object that PyTorch reads as an array on a CUDA device."""

    def __init__(self, mapping: npt.NDArray[np.uint8]) -> None:
        self._mapping = mapping
        self.__cuda_array_interface__ = {
            "shape": (mapping.nbytes,),
            "typestr": "|u1",
            "data": (mapping.ctypes.data, False),
            "version": 3,
        }
