"""The default size of the KV cache in host memory."""

from __future__ import annotations

from pathlib import Path

import psutil

GRANULE_BYTES = 64 * 2**20
LEAST_BYTES = 256 * 2**20
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def default_arena_bytes() -> int:
    """A quarter of the memory that is free, or that a container allows: steps of 64 MiB, from 256 MiB."""
    available = min(psutil.virtual_memory().available, _cgroup_available())
    return max(LEAST_BYTES, available // 4 // GRANULE_BYTES * GRANULE_BYTES)


def _cgroup_available() -> int:
    try:
        return int(_CGROUP_LIMIT.read_text()) - int(_CGROUP_USED.read_text())
    except (OSError, ValueError):
        # no cgroup v2, or its limit is the word "max"
        return 2**63
