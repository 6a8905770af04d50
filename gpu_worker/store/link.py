"""Calls to the store, and attaching again to one that was restarted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TypeVar

from gpu_worker.errors import ArenaFull, CapacityError, PrefixLoading, StoreSilent, StoreUnavailable
from gpu_worker.policies.recall import IndexJob
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.device_arena import DeviceArena
from gpu_worker.store.kv_meter import KVMeter
from kv_store.client import (
    HandoffRefused,
    IndexSegment,
    StaleEpoch,
    StoreClient,
    StoreError,
    StoreFull,
    StoreUnreachable,
)
from kv_store.client import PrefixLoading as Loading
from kv_store.client import StoreSilent as NoAnswer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# After one of these the attachment is gone, with all that it held; any other error concerns one request.
LOST = (StoreUnreachable, StaleEpoch, HandoffRefused)


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """An index that is being built: `future` gives the segment of `layer`."""

    layer: int
    job: IndexJob
    future: Future[IndexSegment]

    @property
    def has_failed(self) -> bool:
        future = self.future
        return future.done() and not future.cancelled() and future.exception() is not None


class ArenaLink:
    """The connection to the store, whose errors it translates to the worker's.

    client: for what makes no call, and for operations of `call`. arena: the attached store's. meter: measures how long
    the host waits. is_attached: whether the next sequence can be opened without attaching again.
    """

    def __init__(
        self, client: StoreClient, arena: DeviceArena, meter: KVMeter, hides_training: bool = False
    ) -> None:
        """hides_training: let the store bound the training of an index by the layer's prefill time."""
        self.client = client
        self.arena = arena
        self.meter = meter
        self.is_attached = True
        self._is_mapped = True
        self._hides_training = hides_training

    @property
    def is_reachable(self) -> bool:
        """Return whether a sequence that is opened now is likely to be served; makes no call, from any thread."""
        return self.is_attached and self.client.is_answering

    def must_attach(self) -> bool:
        """Return whether a store answers that does not have our rows. Never waits for it."""
        if not self.client.is_answering:
            return False
        if self.is_attached:
            try:
                self.client.check()
                return False
            except NoAnswer:
                return False
            except StoreError:
                self.is_attached = False
        return True

    def attach(self) -> None:
        """Attach to the store that answers; rows of before are lost, also if this fails. Raises StoreError."""
        self._unmap()
        if self.client.silent_seconds:
            raise NoAnswer("the KV store does not answer")
        if not self.client.is_answering:
            raise StoreUnreachable("the KV store is gone")
        self.client.reattach()
        self._is_mapped = True
        self.arena.map()
        self.is_attached = True

    def unmap_lost(self) -> None:
        """Release the arena of a store that is gone, to free memory for the next. No sequence may have rows there."""
        if self._is_mapped and not self.client.is_answering and not self.client.silent_seconds:
            self._unmap()

    def _unmap(self) -> None:
        self.is_attached = False
        self._is_mapped = False
        self.arena.close()
        self.client.unmap()

    def check(self) -> None:
        """Raise StoreUnavailable once the slabs of our sequences may be given to others. Makes no call."""
        self.call(self.client.check)

    def check_answers(self) -> None:
        """Raise StoreSilent while the store is silent. Makes no call."""
        if self.client.silent_seconds:
            raise StoreSilent("the KV store does not answer")

    def call(self, operation: Callable[[], Result]) -> Result:
        """Return the operation's result. Raises ArenaFull, CapacityError, PrefixLoading, StoreSilent or
        StoreUnavailable where the store's client raises.

        Their texts are for users: the names of sockets and sequences go to the log.
        """
        try:
            return operation()
        except StoreFull as error:
            text = f"the KV store is full: {error.text}"
            if not error.missing_bytes:
                raise CapacityError(text) from error
            raise ArenaFull(text, error.missing_bytes) from error
        except Loading as error:
            raise PrefixLoading("a known prefix comes from the KV store's disk") from error
        except NoAnswer as error:
            raise StoreSilent("the KV store does not answer") from error
        except LOST as error:
            if self.is_attached:
                logger.warning("the KV store is lost: %s", error)
            self.is_attached = False
            raise StoreUnavailable("the KV store does not answer, or has lost the request's rows") from error
        except StoreError as error:
            logger.warning("the KV store failed: %s", error)
            raise StoreUnavailable(
                "the KV store failed while the request ran; the log has the cause"
            ) from error

    def call_once(self, operation: Callable[[], Result]) -> Result:
        """As `call`, for an operation that cannot be repeated later: raises StoreUnavailable for a silent store too."""
        try:
            with self.meter.waiting():
                return self.call(operation)
        except StoreSilent as error:
            raise StoreUnavailable(str(error)) from error

    def build_index(
        self, sequence: Sequence, layer: int, job: IndexJob, prefill_seconds: float = 0.0
    ) -> TrainedLayer:
        """Ask for an index over sealed rows; returns at once. Raises what `call` raises.

        prefill_seconds: time that the layer took; 0 if unknown.
        """
        seconds = prefill_seconds if self._hides_training else 0.0
        future = self.call(
            lambda: self.client.build_index(
                sequence.sequence_id,
                layer,
                job.begin,
                job.end,
                job.params,
                seed=sequence.request.sampling.seed or 0,
                prefill_seconds=seconds,
            )
        )
        return TrainedLayer(layer, job, future)

    def load_index(self, trained: TrainedLayer, timeout_seconds: float) -> IndexSegment | None:
        """Return the trained segment, or None if it is not ready within the time. Raises what `call` raises."""
        try:
            segment = self.call(lambda: trained.future.result(timeout_seconds))
        except FutureTimeout:
            segment = None
        # Once the lease is lost no index comes any more, and the slabs of one that came may be another's.
        self.check()
        return segment
