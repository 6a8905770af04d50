"""Pages of a CUDA device, through the driver's virtual memory (CUDA Driver API, "Virtual Memory Management").

The idea to grow a model's cache behind fixed addresses is vAttention's (Prabhu et al., ASPLOS 2025): kernels and
captured steps see plain tensors, and memory follows what is used. On an H100 a page takes 45 us to put in place and 29
us to take away; the device's work goes on meanwhile.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import bytes_at
from gpu_worker.errors import CapacityError, ConfigError
from gpu_worker.memory.base import Addresses, PageIds, Pages

# The least that CUDA devices give.
PAGE_BYTES = 2 << 20
_OUT_OF_MEMORY = 2
# CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaPages(Pages):
    """All pages are taken at once, so that what a plan counts on is there."""

    page_bytes = PAGE_BYTES

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Rounds down to whole pages. Raises ConfigError where the device has too few."""
        torch.zeros(1, device=device)  # the driver's calls need a context
        self._device = device
        num_pages = num_bytes // PAGE_BYTES
        # The last one stands for all others.
        self._handles: list[int] = []
        own = _Range(device, num_pages)
        weakref.finalize(own, _release, self._handles).atexit = False
        for count in range(num_pages + 1):
            if (handle := _create(device)) is None:
                raise ConfigError(
                    f"the device gave {count} of {num_pages} pages of {PAGE_BYTES} bytes for slots; give less with "
                    "--slot-memory or --gpu-memory-limit, or end what else uses the device"
                )
            self._handles.append(handle)
        own.put(0, self._handles[:-1])
        self.bytes = own.tensor()

    def reserve(self, num_pages: int) -> Addresses:
        return _CudaAddresses(_Range(self._device, num_pages), self._handles, self.bytes, self._device)


class _CudaAddresses(Addresses):
    def __init__(self, addresses: _Range, handles: list[int], owner: Tensor, device: torch.device) -> None:
        """owner: keeps the pages."""
        self._device = device
        self._range = addresses
        self._handles = handles
        self._owner = owner
        self.bytes = addresses.tensor()

    def back(self, first: int, pages: PageIds) -> None:
        self._range.put(first, [self._handles[page] for page in pages.tolist()])

    def back_alone(self, first: int, num_pages: int) -> None:
        handles = [_create(self._device) for _ in range(num_pages)]
        try:
            if None in handles:
                raise CapacityError(
                    f"the device has no {num_pages} pages of {PAGE_BYTES} bytes left beside the slots; give less with "
                    "--slot-memory or --gpu-memory-limit"
                )
            self._range.put(first, [handle for handle in handles if handle is not None])
        finally:
            # The driver keeps a page for as long as it is behind something.
            _release([handle for handle in handles if handle is not None])


class _Range:
    """Reserved addresses of a device, and which of its pages have something behind them. Freed with the last tensor
    over them."""

    def __init__(self, device: torch.device, num_pages: int) -> None:
        self._device = device
        self._num_bytes = num_pages * PAGE_BYTES
        address = ctypes.c_uint64()
        _check(
            "cuMemAddressReserve",
            _driver().cuMemAddressReserve(
                ctypes.byref(address), ctypes.c_size_t(self._num_bytes), ctypes.c_size_t(PAGE_BYTES), *_ZEROS
            ),
        )
        self._address = address.value
        self._is_backed = np.zeros(num_pages, np.bool_)
        ends = weakref.finalize(self, _free, self._address, self._num_bytes, self._is_backed, device)
        # The process's end frees all, and by then the driver may be gone.
        ends.atexit = False

    def tensor(self) -> Tensor:
        return bytes_at(self._address, self._num_bytes, self._device, owner=self)

    def put(self, first: int, handles: list[int]) -> None:
        """Put pages behind the places from `first` on. Raises CapacityError."""
        if not handles:
            return
        driver, at = _driver(), self._address + first * PAGE_BYTES
        backed = self._is_backed[first : first + len(handles)]
        for place in np.flatnonzero(backed).tolist():
            _unmap(at + place * PAGE_BYTES)
        backed[:] = False
        for place, handle in enumerate(handles):
            result = driver.cuMemMap(
                ctypes.c_uint64(at + place * PAGE_BYTES),
                ctypes.c_size_t(PAGE_BYTES),
                ctypes.c_size_t(0),
                ctypes.c_uint64(handle),
                ctypes.c_uint64(0),
            )
            _check("cuMemMap", result)
            backed[place] = True
        access = _Access(_Location(_DEVICE, self._device.index or 0), _READ_WRITE)
        num_bytes = ctypes.c_size_t(len(handles) * PAGE_BYTES)
        result = driver.cuMemSetAccess(
            ctypes.c_uint64(at), num_bytes, ctypes.byref(access), ctypes.c_size_t(1)
        )
        _check("cuMemSetAccess", result)


_ZEROS = (ctypes.c_uint64(0), ctypes.c_uint64(0))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(call: str, result: int) -> None:
    if result:
        raise CapacityError(
            f"the CUDA driver refused memory: {call} returned {result}; start with less memory"
        )


def _create(device: torch.device) -> int | None:
    """Return a page of the device; None where it has no more. Raises CapacityError."""
    location = _Location(_DEVICE, device.index or 0)
    properties = _Properties(_PINNED, 0, location, None, _AllocationFlags())
    handle = ctypes.c_uint64()
    result = _driver().cuMemCreate(
        ctypes.byref(handle), ctypes.c_size_t(PAGE_BYTES), ctypes.byref(properties), ctypes.c_uint64(0)
    )
    if result == _OUT_OF_MEMORY:
        return None
    _check("cuMemCreate", result)
    return handle.value


def _unmap(address: int) -> None:
    _driver().cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(PAGE_BYTES))


def _free(address: int, num_bytes: int, is_backed: npt.NDArray[np.bool_], device: torch.device) -> None:
    torch.cuda.synchronize(device)
    for place in np.flatnonzero(is_backed).tolist():
        _unmap(address + place * PAGE_BYTES)
    _driver().cuMemAddressFree(ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))


def _release(handles: list[int]) -> None:
    """The driver frees a page once nothing has it mapped."""
    for handle in handles:
        _driver().cuMemRelease(ctypes.c_uint64(handle))
