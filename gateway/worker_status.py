"""What is known of the worker, and whether this server can serve."""

from __future__ import annotations

import logging

from gateway.admission import Admission
from gateway.errors import ServiceError, VersionMismatch
from gateway.worker_client import WorkerClient
from gpu_worker.v1 import gpu_worker_pb2 as pb

log = logging.getLogger(__name__)


class WorkerStatus:
    """Asks the worker; its constant facts only once, until `forget`."""

    def __init__(self, worker: WorkerClient, admission: Admission) -> None:
        self._worker = worker
        self._admission = admission
        self._info: pb.GetInfoResponse | None = None
        # The latest that is known, also of a worker that was lost.
        self.latest: pb.GetInfoResponse | None = None
        self._logged = ""

    async def info(self) -> pb.GetInfoResponse:
        """What the worker says of itself. Raises WorkerUnavailable, VersionMismatch, which is logged."""
        if self._info is None:
            try:
                self.latest = self._info = await self._worker.info()
            except VersionMismatch as error:
                # once, although probes come every few seconds
                if error.message != self._logged:
                    log.error("%s", error.message)
                self._logged = error.message
                raise
        return self._info

    def forget(self) -> None:
        """The worker was lost; the next one may differ."""
        self._info = None

    async def is_alive(self) -> bool:
        """Liveness: the worker answers, whether or not it serves already."""
        try:
            await self._worker.is_serving()
        except ServiceError:
            return False
        return True

    async def why_not_ready(self) -> str | None:
        """None when a request would be served now, else what is missing."""
        if self._admission.is_draining:
            return "The server is shutting down."
        try:
            if not await self._worker.is_serving():
                return "The model worker is still loading, or is shutting down."
            await self.info()
            if not (await self._worker.stats()).store_reachable:
                return "The KV store cannot be reached."
        except ServiceError as error:
            return error.message
        return None

    async def stats(self) -> pb.StatsResponse | None:
        """The worker's counters; None when it does not answer."""
        try:
            return await self._worker.stats()
        except ServiceError:
            return None
