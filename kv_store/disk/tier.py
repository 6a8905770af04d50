"""The disk tier as the store sees it: told what is listed, held and dropped, and asked for what is not in the arena."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from kv_store.client.layout import SlabGeometry
from kv_store.client.stats import DiskStats
from kv_store.client.wire import own_edition
from kv_store.disk.catalog import Catalog, Chain, Unneeded
from kv_store.disk.column import ColumnFormat
from kv_store.disk.files import DiskCounts, Found, TierFiles
from kv_store.disk.folder import TierFolder
from kv_store.disk.loader import ChainLoader
from kv_store.disk.session_file import SavedSession
from kv_store.disk.write_queue import WriteQueue
from kv_store.disk.writer import ChainWriter
from kv_store.sessions import Session
from kv_store.state import StoreState

_log = logging.getLogger(__name__)

# What waits to be written at the end may take so long.
DRAIN_SECONDS = 5.0
# A disk that was full is looked at so often.
LOOK_SECONDS = 300.0


class DiskTier:
    """Every method but `settle` and `close` expects its caller to hold the store's lock, and waits for no disk but
    `adopt`, of which the first worker's attachment is part. An error of the disk is counted and logged, and costs what
    was to be written or read.

    folder: is closed with it, and where it raises NoThreads. max_bytes: of slabs.
    """

    def __init__(self, state: StoreState, folder: TierFolder, max_bytes: int) -> None:
        self._state = state
        self._folder = folder
        self._max_bytes = max_bytes
        self.counts = DiskCounts()
        self._geometry: SlabGeometry | None = None
        self._catalog: Catalog | None = None
        self._files: TierFiles | None = None
        self._writer: ChainWriter | None = None
        # When it was last seen how much room a full disk has.
        self._looked_at = 0.0
        with contextlib.ExitStack() as stack:
            stack.callback(folder.close)
            self._queue = WriteQueue(self._write, self._remove, self._skipped, self._failed)
            stack.callback(self._queue.close, DRAIN_SECONDS)
            self._loader = ChainLoader(state, self._queue.remove, self._failed)
            stack.pop_all()

    def stats(self) -> DiskStats:
        num_bytes = 0 if self._catalog is None else self._catalog.num_bytes
        return DiskStats(num_bytes, **asdict(self.counts))

    def adopt(self) -> None:
        """Find what an earlier store left of the layout that the arena has now, and remove what is of another. Harmless
        again."""
        if self._geometry is self._state.geometry:
            return
        self._geometry = self._state.geometry
        layout = ColumnFormat(self._geometry, own_edition())
        self._queue.clear()
        self._loader.give_up()
        self._catalog = Catalog(layout.file_bytes, self._max_bytes)
        self._files = TierFiles(self._folder, layout, self.counts)
        self._writer = ChainWriter(self._state, self._catalog, self._files, self._remove_at_once)
        try:
            columns, sessions = self._files.scan()
        except OSError as error:
            self._failed(error)
            return
        today = time.time()
        for found in in_order(columns):
            column, idle_seconds = found.column, max(0.0, today - found.used_at)
            self._catalog.add(column.name, column.before, column.owner, idle_seconds)
        for session in sorted(sessions, key=lambda each: each.used_at):
            self._restore(session, self._catalog)
        unneeded = self._catalog.make_room(self._state.sessions.has_pin)
        # Listed, they would have nothing.
        self._state.sessions.note_kept(dict.fromkeys(unneeded.sessions, ()))
        self._queue.remove(unneeded)
        _log.info(
            "%d bytes of slabs and %d sessions are in %s",
            self._catalog.num_bytes,
            len(self._state.sessions),
            self._folder.path,
        )

    def must_wait(self, hashes: Sequence[bytes], owner: str) -> bool:
        """Whether more of this prefix, an owner's, will be in the arena soon than is now: ask again. For some seconds
        at most."""
        if self._catalog is None or self._files is None:
            return False
        self._catalog.touch(hashes)
        return self._loader.must_wait(tuple(hashes), owner, self._catalog, self._files)

    def keep_prefix(self, hashes: tuple[bytes, ...], owner: str) -> None:
        """An owner's slabs that were listed for reuse."""
        if self._catalog is not None and self._catalog.count(hashes) < len(hashes):
            self._queue.put(Chain(hashes, owner))

    def keep_session(self, name: str, session: Session) -> None:
        """What a session holds by now, and when its pin ends."""
        self._queue.put(Chain(session.hashes, session.owner, name))

    def drop_session(self, name: str, session: Session) -> None:
        """What the store forgets with it."""
        if self._catalog is not None:
            self._queue.remove(self._catalog.drop_session(name, session.hashes))

    def settle(self) -> None:
        """Wait until all that was to be written by now is."""
        self._queue.settle()

    def close(self) -> None:
        """What is still to be written is, for some seconds. Another store may have the folder then."""
        self._loader.close(DRAIN_SECONDS)
        self._queue.close(DRAIN_SECONDS)
        self._folder.close()

    def _restore(self, saved: SavedSession, catalog: Catalog) -> None:
        """List a session as far as what it holds is there."""
        hashes = saved.hashes[: catalog.count(saved.hashes)]
        if not hashes:
            self._queue.remove(Unneeded(sessions=[saved.name]))
            return
        catalog.add_session(replace(saved, hashes=hashes))
        nothing = np.empty(0, np.int32)
        session = Session(
            saved.owner,
            saved.label,
            hashes,
            nothing,
            saved.created_at,
            saved.used_at,
            saved.pinned_until,
            hashes,
        )
        self._state.sessions.restore(saved.name, session)

    def _write(self, chain: Chain) -> None:
        writer, catalog = self._writer, self._catalog
        if writer is None or catalog is None:
            return
        if catalog.is_short and time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._fit(catalog, self._folder.free_bytes())
        try:
            writer.write(chain)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._fit(catalog, 0)
            raise

    def _fit(self, catalog: Catalog, free_bytes: int) -> None:
        with self._state.lock:
            catalog.fit(free_bytes)
        self._looked_at = time.monotonic()

    def _remove(self, unneeded: Unneeded) -> None:
        files, catalog = self._files, self._catalog
        if files is None or catalog is None:
            return
        with self._state.lock:
            # What was written anew meanwhile is wanted. Only this thread writes.
            columns = [name for name in unneeded.columns if name not in catalog]
            sessions = [name for name in unneeded.sessions if not catalog.held(name)]
        files.remove(Unneeded(columns, sessions))

    def _remove_at_once(self, unneeded: Unneeded) -> None:
        """Raises OSError; it is tried again then, as no store may find again what this one has given up."""
        try:
            self._remove(unneeded)
        except OSError:
            self._queue.remove(unneeded)
            raise

    def _skipped(self, count: int) -> None:
        self.counts.num_skipped += count

    def _failed(self, error: OSError) -> None:
        self.counts.num_errors += 1
        _log.error(
            "the disk of %s failed: %s; what was to be kept or found there is left out",
            self._folder.path,
            error.strerror or error,
        )


def in_order(found: Sequence[Found]) -> list[Found]:
    """The least recently used first; a predecessor was used whenever what follows it was, whatever its file says."""
    used_at = {each.column.name: each.used_at for each in found}
    for each in sorted(found, key=lambda each: -each.column.place):
        before = each.column.before
        if before in used_at:
            used_at[before] = max(used_at[before], used_at[each.column.name])
    told = [replace(each, used_at=used_at[each.column.name]) for each in found]
    return sorted(told, key=lambda each: (each.used_at, -each.column.place))
