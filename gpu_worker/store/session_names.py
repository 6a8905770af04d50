"""What the store calls a conversation."""

from __future__ import annotations

import hashlib

from gpu_worker.records import GenerationRequest


def session_name(request: GenerationRequest) -> str:
    """Of the caller's own session; "" for a request of none. It tells neither the caller nor what they call it."""
    if not request.session_id:
        return ""
    name = request.session_id.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(name, key=request.prefix_salt[:64], digest_size=32, person=b"session").hexdigest()
