"""The one region of host memory that holds every row: a memfd, sealed against shrinking and growing."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets

import numpy as np

from kv_store.client.handoff import SEALS, ArenaHandle
from kv_store.errors import ConfigError


class Arena:
    """Owns the memory until `close`; `data` is uint8 [num_bytes]. Raises ConfigError when it cannot be made."""

    def __init__(self, num_bytes: int) -> None:
        # 63 bits: the epoch survives a trip through any signed 64-bit field, and 0 never is one.
        self.handle = ArenaHandle(secrets.token_bytes(16), secrets.randbits(63) | 1, num_bytes)
        self.descriptor = os.memfd_create("carrel-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            mapping = mmap.mmap(self.descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as exc:
            os.close(self.descriptor)
            raise ConfigError(
                f"--arena-bytes {num_bytes}: the arena cannot be mapped: {exc}; choose less"
            ) from exc
        self.data = np.frombuffer(mapping, np.uint8)

    def close(self) -> None:
        """Give the descriptor back; the memory goes when the last array that views it goes."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.data = np.empty(0, np.uint8)
