"""What this worker is made of, which gateways compare with themselves."""

from __future__ import annotations

import functools

from gpu_worker.v1 import gpu_worker_pb2 as pb
from kv_store.client.edition import Edition, edition_of


@functools.cache
def own_edition() -> Edition:
    """Of a worker towards its callers."""
    return edition_of(pb.DESCRIPTOR)
