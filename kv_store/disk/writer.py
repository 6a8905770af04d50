"""Sealed slabs and sessions on their way from the arena to files."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kv_store.client.checksum import checksums
from kv_store.disk.catalog import Catalog, Chain, Unneeded
from kv_store.disk.column import Column
from kv_store.disk.files import TierFiles
from kv_store.disk.session_file import SavedSession
from kv_store.state import StoreState


class ChainWriter:
    """Writes chains of one layout. Holds the store's lock for moments only, and no slab: what is evicted meanwhile is
    not written.

    remove: takes files that are of no use, later where it cannot now. Raises OSError then.
    """

    def __init__(
        self, state: StoreState, catalog: Catalog, files: TierFiles, remove: Callable[[Unneeded], None]
    ) -> None:
        self._state = state
        self._catalog = catalog
        self._files = files
        self._remove = remove
        layout = files.layout
        self._slabs = np.empty((layout.num_layers, layout.slab_bytes), np.uint8)

    def write(self, chain: Chain) -> None:
        """As much of a chain from its first slabs on as there is and finds room, then the session. Raises OSError."""
        num_there = 0
        while num_there < len(chain.hashes) and self._write_column(chain, num_there):
            num_there += 1
        if chain.session:
            self._write_session(chain, num_there)
        elif num_there < len(chain.hashes):
            self._files.counts.num_skipped += 1

    def _write_column(self, chain: Chain, place: int) -> bool:
        """Whether it is on the disk now."""
        state, catalog, hashes = self._state, self._catalog, chain.hashes
        name = hashes[place]
        with state.lock:
            if name in catalog:
                return True
            slabs = state.prefixes.find(name)
            if slabs is None:
                return False
            unneeded = catalog.make_room(state.sessions.has_pin, chain)
            state.sessions.note_kept({each: catalog.held(each) for each in unneeded.sessions})
            has_room = catalog.has_room
        self._remove(unneeded)
        if not has_room:
            return False
        if (sums := self._copy(name, slabs)) is None:
            return False
        before = hashes[place - 1] if place else None
        self._files.write_column(Column(name, before, place, chain.owner, sums), self._slabs)
        with state.lock:
            # Who dropped it in the meantime wants it nowhere.
            if is_wanted := state.prefixes.find(name) is slabs:
                catalog.add(name, before, chain.owner)
                catalog.touch(hashes[: place + 1])
        if not is_wanted:
            self._remove(Unneeded([name]))
        return is_wanted

    def _copy(self, name: bytes, slabs: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64] | None:
        """The checksums that were taken when the slabs were sealed, of what lies in `_slabs` now; None where that is
        not what they held then."""
        state = self._state
        for layer, slab in enumerate(slabs):
            begin = int(slab) * state.slab_bytes
            self._slabs[layer] = state.arena.data[begin : begin + state.slab_bytes]
        if state.checksums.sums(slabs) is None:
            state.checksums.settle()
        with state.lock:
            sums = state.checksums.sums(slabs)
            if sums is None or state.prefixes.find(name) is not slabs:
                return None
        return sums if (checksums(self._slabs) == sums).all() else None

    def _write_session(self, chain: Chain, num_there: int) -> None:
        state, catalog, name = self._state, self._catalog, chain.session
        with state.lock:
            session = state.sessions.find(name)
            if session is None or session.hashes != chain.hashes or not num_there:
                return
            saved = SavedSession.of(name, session, chain.hashes[:num_there])
        self._files.write_session(saved)
        with state.lock:
            # Other sessions may have gone for their number since.
            gone = [each for each in catalog.sessions if state.sessions.find(each) is None]
            for each in gone:
                catalog.remove_session(each)
            if catalog.count(saved.hashes) == num_there and state.sessions.find(name) is not None:
                catalog.add_session(saved)
                state.sessions.note_kept({name: saved.hashes})
            else:
                gone.append(name)
        self._remove(Unneeded(sessions=gone))
