"""The process's memory, given back to the system after a flood of requests."""

from __future__ import annotations

import asyncio
import ctypes
import resource
from pathlib import Path

from gateway.service import ChatService

# of mallopt in glibc's malloc.h
M_MMAP_THRESHOLD = -3
# larger pieces are given back when they are freed; left alone glibc raises this to 32 MiB
LARGE_BYTES = 2**17
LOOKED_EVERY_S = 5.0
# more than this since memory was last given back
GROWN_BYTES = 64 * 2**20


def map_large_pieces() -> None:
    """Take large pieces of memory from the system one by one, for the whole process. Does nothing without glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back() -> None:
    """Return free pages to the system, in all threads' heaps; waits for some tenths of a second, outside Python's lock.
    Does nothing without glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def resident_bytes() -> int:
    """Memory of this process that is not in files; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * resource.getpagesize()


async def keep_giving_back(service: ChatService) -> None:
    """Give memory back whenever the server is idle and has grown: the heap is locked meanwhile, so that a request would
    wait."""
    least = resident_bytes()
    while True:
        await asyncio.sleep(LOOKED_EVERY_S)
        is_idle = not service.admission.num_running and not service.bodies.room.num_bytes
        if is_idle and resident_bytes() > least + GROWN_BYTES:
            await asyncio.to_thread(give_back)
            least = resident_bytes()
        least = min(least, resident_bytes())
