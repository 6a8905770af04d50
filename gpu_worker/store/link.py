"""The connection to the store, and attaching again to one that was restarted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gpu_worker.errors import (
    ArenaFull,
    CapacityError,
    PrefixLoading,
    StoreSilent,
    StoreUnavailable,
)
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.device_arena import DeviceArena
from gpu_worker.store.kv_meter import KVMeter
from gpu_worker.store.prefixes import KnownPrefixes
from gpu_worker.store.sessions import NO_SESSION, SessionName
from kv_store.client import (
    HandoffRefused,
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


@dataclass(slots=True)
class Extent:
    """How many tokens a sequence may write to the store, has surely written, and may read.

    shared: so many first tokens are in shared slabs and never written. hashes: names of the slabs that its
    prompt fills. slabs: int32 [L, slabs of a layer], as the store gave them. num_adopted: layers of which the device
    knows the slabs. is_copy: the sequence does without what it writes (`PromptCopies`).
    """

    reserved: int = 0
    written: int = 0
    sealed: int = 0
    shared: int = 0
    hashes: tuple[bytes, ...] = ()
    slabs: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    num_adopted: int = 0
    is_copy: bool = False


class StoreLink:
    """Calls the store; `extents` and `known` are emptied when the rows that they describe are lost.

    is_attached: whether the next sequence can be opened without attaching again.
    """

    def __init__(
        self,
        client: StoreClient,
        arena: DeviceArena,
        extents: dict[str, Extent],
        known: KnownPrefixes,
        meter: KVMeter,
    ) -> None:
        self._client = client
        self._arena = arena
        self._extents = extents
        self._known = known
        self._meter = meter
        self._is_mapped = True
        self.is_attached = True

    @property
    def is_reachable(self) -> bool:
        """Whether a sequence that is opened now is likely to be served; makes no call, and any thread may ask."""
        return self.is_attached and self._client.is_answering

    @property
    def silent_seconds(self) -> float:
        """See `StoreClient.silent_seconds`."""
        return self._client.silent_seconds

    def begin(
        self, sequence_id: str, num_tokens: int, hashes: tuple[bytes, ...], num_reusable: int, owner: str
    ) -> Extent:
        """Start an owner's sequence with room for so many tokens in all, which reads the longest known prefix of the
        first `num_reusable` hashes; after a failure or a restart of the store, attach again. Nothing is left of one
        that does not start. Raises StoreError."""
        if self.is_attached:
            try:
                return self.begin_attached(sequence_id, num_tokens, hashes, num_reusable, owner)
            except StaleEpoch:
                # It answers, as a new start that holds nothing of ours; this request has lost nothing.
                self.is_attached = False
        self._attach_anew()
        return self.begin_attached(sequence_id, num_tokens, hashes, num_reusable, owner)

    def begin_attached(
        self,
        sequence_id: str,
        num_tokens: int,
        hashes: tuple[bytes, ...],
        num_reusable: int,
        owner: str,
        is_copy: bool = False,
    ) -> Extent:
        """As `begin`, but nothing is attached again. is_copy: where room is missing it only reads what is known, and no
        extent is held where that is nothing."""
        begun = self._client.begin(sequence_id, num_tokens, hashes[:num_reusable], is_copy, owner)
        num_shared, reserved = begun.num_shared, begun.slab_table.shape[1] * self._client.tokens_per_slab
        extent = Extent(
            reserved, num_shared, num_shared, num_shared, hashes, begun.slab_table, is_copy=is_copy
        )
        if reserved:
            self._extents[sequence_id] = extent
        return extent

    def verify(self, sequence: Sequence) -> Future[int] | None:
        """Start to compare what a sequence shares with its checksums: how many slabs are corrupt; None where it shares
        nothing. The future raises StoreError."""
        return self._client.verify(sequence.sequence_id) if sequence.num_cached else None

    def reserve(self, sequence_id: str, num_tokens: int) -> None:
        """Room for so many tokens of an open sequence in all. Raises CapacityError that names the missing bytes, and
        StoreUnavailable."""
        extent, per_slab = self._extents[sequence_id], self._client.tokens_per_slab
        with self._meter.waiting():
            extent.slabs = self.call(lambda: self._client.reserve(sequence_id, num_tokens))
        extent.reserved = -(-num_tokens // per_slab) * per_slab

    def end(
        self,
        sequence_id: str,
        seat: int,
        num_tokens: int = 0,
        hashes: tuple[bytes, ...] = (),
        session: SessionName = NO_SESSION,
    ) -> None:
        """Free a sequence's slabs, in a silent store once it answers; nothing is left to free in one that is gone.
        Never waits for the store. Nothing on the device may write to them any more: they become others'.

        num_tokens, hashes, session: what is sealed before, as `seal` does in all layers; 0: nothing is.
        """
        if self._extents.pop(sequence_id, None) is None:
            return
        self._arena.forget(seat)
        self._client.end(sequence_id, num_tokens, hashes, *session)
        self._known.add(hashes)

    def seal(
        self,
        sequence_id: str,
        num_tokens: int,
        layers: range,
        hashes: tuple[bytes, ...] = (),
        session: SessionName = NO_SESSION,
    ) -> None:
        """Make written layers readable; by hashes others find them, which the session keeps. Raises
        StoreUnavailable."""
        self.call(
            lambda: self._client.seal(
                sequence_id,
                num_tokens,
                layer_begin=layers.start,
                layer_end=layers.stop,
                prefix_hashes=hashes,
                session_id=session.name,
                session_label=session.label,
            )
        )
        self._known.add(hashes)

    def renew(self) -> bool:
        """Attach again when a lost store answers; True if so, and then the sequences' rows are gone.

        Never waits for a store that does not answer. When it is gone, its arena is released once nothing reads from it,
        to make room for the next.
        """
        if not self._client.is_answering:
            if not self._client.silent_seconds and not self._extents and self._is_mapped:
                self._let_go()
            return False
        if self.is_attached:
            try:
                self._client.check()
                return False
            except NoAnswer:
                return False
            except StoreError:
                self.is_attached = False
        # If it went again, the next look tells.
        with contextlib.suppress(StoreError):
            self._attach_anew()
        return True

    def call(self, operation: Callable[[], Result]) -> Result:
        """Its result. Raises ArenaFull, CapacityError, PrefixLoading, StoreSilent or StoreUnavailable
        where the store's client raises.

        Their texts are for users: what names sockets and sequences goes to the log.
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

    def check(self) -> None:
        """Raises StoreUnavailable once the slabs of our sequences may be given to others. Makes no call."""
        self.call(self._client.check)

    def call_once(self, operation: Callable[[], Result]) -> Result:
        """As `call`, for what cannot be asked again later: silence is an end too."""
        try:
            with self._meter.waiting():
                return self.call(operation)
        except StoreSilent as error:
            raise StoreUnavailable(str(error)) from error

    def _attach_anew(self) -> None:
        # From here on nothing of before is held, also if the store is not there.
        self._extents.clear()
        self._known.clear()
        self._let_go()
        if self._client.silent_seconds:
            raise NoAnswer("the KV store does not answer")
        if not self._client.is_answering:
            raise StoreUnreachable("the KV store is gone")
        self._client.reattach()
        self._is_mapped = True
        self._arena.map()
        self.is_attached = True

    def _let_go(self) -> None:
        self.is_attached = False
        self._is_mapped = False
        self._arena.close()
        self._client.unmap()
