"""The state of the worker, and whether this server can serve."""

from __future__ import annotations

import logging
from typing import Protocol

from gateway.admission import Admission
from gateway.errors import ServiceError, ShuttingDown, StoreUnavailable, VersionMismatch, WorkerUnavailable
from gateway.tasks import Joined
from gateway.worker_client import WorkerClient
from gpu_worker.v1 import gpu_worker_pb2 as pb

log = logging.getLogger(__name__)


class Rehearsal(Protocol):
    """A trial of the worker before this server is ready."""

    async def has_ended(self) -> bool:
        """Return whether it has ended, well or not; the first call begins it."""

    def forget(self) -> None:
        """The worker was lost."""


class WorkerStatus:
    """Asks the worker; its constant facts only once, until `forget`."""

    def __init__(
        self, worker: WorkerClient, admission: Admission, rehearsal: Rehearsal | None = None
    ) -> None:
        self._worker = worker
        self._admission = admission
        self._rehearsal = rehearsal
        self._info: pb.GetInfoResponse | None = None
        # The latest that is known, also of a worker that was lost.
        self.latest: pb.GetInfoResponse | None = None
        self._logged = ""
        # anyone may ask these again and again: the worker is asked once at a time
        self.is_alive = Joined(self._is_alive)
        self._readiness = Joined(self._why_not_ready)
        self.stats = Joined(self._stats)
        self.store_stats = Joined(self._store_stats)

    async def info(self) -> pb.GetInfoResponse:
        """Return the worker's description. Raises WorkerUnavailable, VersionMismatch, which is logged."""
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

    async def _is_alive(self) -> bool:
        """Liveness: the worker answers, whether or not it serves already."""
        try:
            await self._worker.is_serving()
        except ServiceError:
            return False
        return True

    async def why_not_ready(self) -> ServiceError | None:
        """None when a request would be served now, else what it would end with."""
        return ShuttingDown() if self._admission.is_draining else await self._readiness()

    async def _why_not_ready(self) -> ServiceError | None:
        try:
            if not await self._worker.is_serving():
                self._rehearse_again()
                return WorkerUnavailable("The model worker is still loading, or is shutting down.")
            await self.info()
            if not (await self._worker.stats()).store_reachable:
                return StoreUnavailable("The KV store cannot be reached.")
            if not await self._is_rehearsed():
                return WorkerUnavailable("The server is warming up.")
        except WorkerUnavailable as error:
            self._rehearse_again()
            return error
        except ServiceError as error:
            return WorkerUnavailable(error.message)
        return None

    async def _is_rehearsed(self) -> bool:
        # while users' requests run it would come too late, and a busy worker would keep it waiting
        return self._rehearsal is None or self._admission.num_running > 0 or await self._rehearsal.has_ended()

    def _rehearse_again(self) -> None:
        """The worker may be another one when it serves again."""
        if self._rehearsal is not None:
            self._rehearsal.forget()

    async def _stats(self) -> pb.StatsResponse | None:
        """The worker's counters; None when it does not answer."""
        try:
            return await self._worker.stats()
        except ServiceError:
            return None

    async def _store_stats(self) -> pb.StoreStatsResponse | None:
        """The store's; None within a second when it, or the worker, does not answer."""
        try:
            return await self._worker.store_stats()
        except ServiceError:
            return None
