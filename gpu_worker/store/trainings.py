"""Indexes over sealed rows, which the store's trainers make."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from gpu_worker.policies.recall import IndexJob
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.link import StoreLink
from kv_store.client import IndexSegment, StoreClient


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


class IndexTrainings:
    """Asks for indexes, and takes them when they are ready. Both may raise StoreUnavailable, or StoreSilent where they
    may be called again with the same arguments."""

    def __init__(self, client: StoreClient, link: StoreLink, hides_training: bool) -> None:
        """hides_training: let the store bound the training of an index by the layer's prefill time."""
        self._client = client
        self._link = link
        self._hides_training = hides_training

    def build(
        self, sequence: Sequence, layer: int, job: IndexJob, prefill_seconds: float = 0.0
    ) -> TrainedLayer:
        """Ask for an index over sealed rows; returns at once. prefill_seconds: that the layer took; 0 if unknown."""
        seed = sequence.request.sampling.seed or 0
        seconds = prefill_seconds if self._hides_training else 0.0
        future = self._link.call(
            lambda: self._client.build_index(
                sequence.sequence_id,
                layer,
                job.begin,
                job.end,
                job.params,
                seed=seed,
                prefill_seconds=seconds,
            )
        )
        return TrainedLayer(layer, job, future)

    def segment(self, trained: TrainedLayer, timeout_seconds: float) -> IndexSegment | None:
        """The trained segment, or None if it is not ready within the time."""
        try:
            segment = self._link.call(lambda: trained.future.result(timeout_seconds))
        except FutureTimeout:
            segment = None
        # Once the lease is lost no index comes any more, and the slabs of one that came may be another's.
        self._link.check()
        return segment
