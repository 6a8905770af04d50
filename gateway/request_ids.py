"""Request ids: what a client may choose, and what the worker sees."""

from __future__ import annotations

import re
import uuid

_SAFE = re.compile(r"[A-Za-z0-9._-]{1,64}")


def public_id(asked: str | None) -> str:
    """The client's own id if it is short and plain, else a new one: an id goes into headers and logs."""
    return asked if asked and _SAFE.fullmatch(asked) else uuid.uuid4().hex


def internal_id(request_id: str, index: int) -> str:
    """The worker's name for one choice; no client can guess another's."""
    return f"{request_id}-{index}-{uuid.uuid4().hex[:16]}"
