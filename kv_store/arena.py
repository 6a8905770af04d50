"""The one region of host memory that holds every row: a memfd, sealed against shrinking and growing."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from pathlib import Path

import numpy as np

from kv_store.client.handoff import SEALS, ArenaHandle
from kv_store.errors import ConfigError

_CGROUP_V2 = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))
_CGROUP_V1 = (
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Memory that a new mapping can fill: the lesser of MemAvailable and what the cgroup has left."""
    bounds = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            bounds.append(int(line.split()[1]) * 1024)
    for limit_file, usage_file in (_CGROUP_V2, _CGROUP_V1):
        if limit_file.is_file() and usage_file.is_file():
            limit = limit_file.read_text().strip()
            if limit != "max":
                bounds.append(max(0, int(limit) - int(usage_file.read_text())))
    return min(bounds)


def check_room(arena_bytes: int) -> None:
    """Raises ConfigError, naming the missing bytes, when the machine cannot hold the arena."""
    if (missing := arena_bytes - available_bytes()) > 0:
        raise ConfigError(
            f"--arena-bytes {arena_bytes}: {missing} bytes more than this machine has free; "
            f"choose at most --arena-bytes {arena_bytes - missing}"
        )


class Arena:
    """Owns the memory until `close`; `data` is uint8 [num_bytes]. Raises ConfigError when it cannot be made."""

    def __init__(self, num_bytes: int) -> None:
        check_room(num_bytes)
        # 63 bits: the epoch survives a trip through any signed 64-bit field, and 0 never is one.
        self.handle = ArenaHandle(secrets.token_bytes(16), secrets.randbits(63) | 1, num_bytes)
        self.descriptor = os.memfd_create("carrel-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            mapping = mmap.mmap(self.descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as exc:
            os.close(self.descriptor)
            raise ConfigError(f"--arena-bytes {num_bytes}: the arena cannot be mapped: {exc}") from exc
        self.data = np.frombuffer(mapping, np.uint8)

    def close(self) -> None:
        """Give the descriptor back; the memory goes when the last array that views it goes."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.data = np.empty(0, np.uint8)
