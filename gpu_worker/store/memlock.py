"""How much memory this process may lock: a driver that counts what it pins refuses more."""

from __future__ import annotations

import resource

REMEDY = (
    "raise it (`ulimit -l unlimited`; LimitMEMLOCK=infinity of a systemd service; `ulimits: {memlock: -1}` of a "
    "container), or give --transport shm, which locks nothing and is slower"
)


def allow_locking(num_bytes: int) -> None:
    """Raise the soft limit as far as needed and as the hard one lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if _covers(soft, num_bytes) or soft == hard:
        return
    wanted = num_bytes if _covers(hard, num_bytes) and hard != resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (wanted, hard))


def too_low(num_bytes: int) -> str | None:
    """What the limit is and how to raise it, where it is below so many bytes; else None."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if _covers(soft, num_bytes):
        return None
    return f"the memlock limit is {soft} bytes, the arena has {num_bytes}: {REMEDY}"


def _covers(limit: int, num_bytes: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= num_bytes
