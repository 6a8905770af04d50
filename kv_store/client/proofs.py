"""Checks of checksums: the store compares those of shared slabs, the client those of indexes."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from carrel.process.ready_threads import ReadyThreads
from kv_store.client.attachment import Attachment, build_and_fetch
from kv_store.client.errors import CorruptRows
from kv_store.client.indexes import IndexSegment
from kv_store.v1 import kv_store_pb2 as pb

_BUILD_THREADS = 16
_VERIFY_THREADS = 4
_CALL_SECONDS = 5.0
# A store compares at least so fast, however busy its cores are.
_LEAST_BYTES_PER_SECOND = 256 << 20


class Proofs:
    """Calls on threads of their own. num_corrupt: slabs and indexes that were not what was written, since the start."""

    def __init__(self) -> None:
        self._builds = ReadyThreads(_BUILD_THREADS, "index-build")
        self._threads = ReadyThreads(_VERIFY_THREADS, "slab-verify")
        self._lock = threading.Lock()
        self.num_corrupt = 0

    def verify(self, attached: Attachment, sequence_id: str, num_tokens: int) -> Future[int]:
        """How many of the slabs that a sequence shares, of so many tokens in all layers, are corrupt. The future raises
        StoreError."""
        layout = attached.geometry.layout
        num_bytes = num_tokens * layout.num_layers * layout.token_bytes
        seconds = _CALL_SECONDS + num_bytes / _LEAST_BYTES_PER_SECOND
        return self._threads.submit(self._verify, attached, sequence_id, seconds)

    def build(self, attached: Attachment, request: pb.BuildIndexRequest) -> Future[IndexSegment]:
        """`build_and_fetch`; a corrupt index is trained once more."""
        return self._builds.submit(self._build, attached, request)

    def _build(self, attached: Attachment, request: pb.BuildIndexRequest) -> IndexSegment:
        try:
            return build_and_fetch(attached, request)
        except CorruptRows:
            self._count(1)
            return build_and_fetch(attached, request)

    def close(self) -> None:
        for threads in (self._builds, self._threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _verify(self, attached: Attachment, sequence_id: str, seconds: float) -> int:
        rpc = attached.rpc
        request = pb.VerifyRequest(
            epoch=attached.epoch, worker_id=attached.worker_id, sequence_id=sequence_id
        )
        with attached.noting_loss():
            num_corrupt = rpc.wait(rpc.stub.Verify, request, seconds).num_corrupt
        self._count(num_corrupt)
        return num_corrupt

    def _count(self, num_corrupt: int) -> None:
        with self._lock:
            self.num_corrupt += num_corrupt
