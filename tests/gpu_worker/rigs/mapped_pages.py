"""Pages of the host that are as a GPU's: what has no page behind it is not there, a page behind two places is one."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np
import torch
from torch import Tensor

from gpu_worker.memory.base import Addresses, PageIds, Pages

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NO_RESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value


class MappedPages(Pages):
    """page_bytes: a multiple of the host's own page."""

    def __init__(self, num_bytes: int, page_bytes: int = mmap.PAGESIZE) -> None:
        self.page_bytes = page_bytes
        count = num_bytes // page_bytes
        # The last page stands for all others.
        self.file = os.memfd_create("pages")
        os.ftruncate(self.file, (count + 1) * page_bytes)
        weakref.finalize(self, os.close, self.file)
        self._own = _Mapped(self, max(1, count))
        self._own.back(0, np.arange(count))
        self.bytes = self._own.bytes[: count * page_bytes]
        # NaN as every float
        self.bytes.fill_(0xFF)

    def reserve(self, num_pages: int) -> Addresses:
        return _Mapped(self, num_pages)


class _Mapped(Addresses):
    def __init__(self, pages: MappedPages, num_pages: int) -> None:
        self._pages = pages
        size = max(1, num_pages * pages.page_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._address = _mapped(None, size, _NONE, flags, -1, 0)
        self.bytes = _tensor_at(self._address, size)

    def back(self, first: int, pages: PageIds) -> None:
        size = self._pages.page_bytes
        others = os.fstat(self._pages.file).st_size // size - 1
        for place, page in enumerate(pages.tolist(), first):
            offset = (others if page < 0 else page) * size
            at = self._address + place * size
            assert _mapped(at, size, _READ_WRITE, mmap.MAP_SHARED | _FIXED, self._pages.file, offset) == at

    def back_alone(self, first: int, num_pages: int) -> None:
        size, flags = num_pages * self._pages.page_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
        _mapped(self._address + first * self._pages.page_bytes, size, _READ_WRITE, flags, -1, 0)


def _mapped(address: int | None, size: int, access: int, flags: int, file: int, offset: int) -> int:
    found: int = _LIBC.mmap(address, size, access, flags, file, offset)
    assert found != _FAILED, os.strerror(ctypes.get_errno())
    return found


def _tensor_at(address: int, size: int) -> Tensor:
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size)
    return torch.frombuffer(memory, dtype=torch.uint8)
