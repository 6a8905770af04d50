"""The disk tier as the store sees it, and the thread that writes to the disk what the store lists and holds."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from carrel.process.ready_threads import start_thread
from kv_store.checksums import checksums
from kv_store.client.stats import DiskStats
from kv_store.client.wire import own_edition
from kv_store.disk.catalog import Catalog
from kv_store.disk.files import Column, SavedSession, TierFiles
from kv_store.disk.folder import TierFolder
from kv_store.disk.loader import ChainLoader
from kv_store.sessions import Session
from kv_store.state import StoreState

_log = logging.getLogger(__name__)

# Prefixes and sessions that may wait to be written.
MAX_WAITING = 1024
# After an error of the disk nothing is written for so long.
PAUSE_SECONDS = 60.0
# Writing what still waits at the end may take so long.
DRAIN_SECONDS = 5.0


class DiskTier:
    """Callers of all methods but `settle` and `close` hold the store's lock, which guards all fields. `adopt` waits for
    the disk. An error of the disk costs what was to be written or read. Where the disk is behind, those that waited for
    longest are left out. No slab is held meanwhile: an evicted one is not written.

    folder: is closed with it, and where it raises NoThreads. max_bytes: of all columns.
    """

    def __init__(self, state: StoreState, folder: TierFolder, max_bytes: int) -> None:
        self._state = state
        self._folder = folder
        self._max_bytes = max_bytes
        self.counts = DiskStats()
        self._catalog: Catalog | None = None
        # session ("" for none) and hashes, by session or last hash
        self._waiting: OrderedDict[str | bytes, tuple[str, tuple[bytes, ...]]] = OrderedDict()
        self._unneeded: set[bytes] = set()
        # of the list of sessions on the disk
        self._version = 0
        self._is_busy = self._is_closing = False
        self._resumes_at = 0.0
        self._changed = threading.Condition(state.lock)
        with contextlib.ExitStack() as stack:
            stack.callback(folder.close)
            self._loader = ChainLoader(state)
            stack.callback(self._loader.close, DRAIN_SECONDS)
            self._thread = start_thread(self._run, "disk-write")
            stack.pop_all()

    def stats(self) -> DiskStats:
        return replace(self.counts, num_bytes=0 if self._catalog is None else self._catalog.num_bytes)

    def adopt(self) -> None:
        """Find what an earlier store left of the arena's current layout, and remove the rest. Harmless again."""
        state, earlier = self._state, self._catalog
        if earlier is not None and earlier.files.geometry is state.geometry:
            return
        files = TierFiles(self._folder, state.geometry, own_edition(), self.counts)
        self._catalog = catalog = Catalog(files, state.sessions, self._max_bytes)
        self._waiting.clear()
        if earlier is not None:
            earlier.clear()
        columns, sessions = files.scan()
        catalog.fill(columns)
        for saved in sorted(sessions, key=lambda each: each.used_at):
            if hashes := catalog.chain(saved.last):
                state.sessions.restore(saved.name, saved.restored(hashes))
        self._remove(catalog.make_room())

    def must_wait(self, hashes: Sequence[bytes], owner: str) -> bool:
        """Return whether more of this owner's prefix will soon be in the arena: the caller asks again, for some seconds
        at most."""
        if self._catalog is None:
            return False
        return self._loader.must_wait(tuple(hashes), owner, self._catalog)

    def keep_prefix(self, hashes: tuple[bytes, ...]) -> None:
        """Keep slabs that were listed for reuse."""
        if self._catalog is not None and any(name not in self._catalog for name in hashes):
            self._put(hashes[-1], "", hashes)

    def keep_session(self, name: str, session: Session) -> None:
        """Keep what a session holds now, and the end of its pin."""
        self._put(name, name, session.hashes)

    def drop_session(self, session: Session) -> None:
        """Remove what the store forgets with a session."""
        if self._catalog is not None:
            self._remove(self._catalog.drop((*session.hashes, *session.kept)))

    def settle(self, seconds: float | None = None) -> None:
        """Wait until all is written and removed that may be now, for so long at most."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_busy and not self._has_work, seconds)

    def close(self) -> None:
        """Write what still waits, for some seconds. Another store may have the folder then."""
        self._loader.close(DRAIN_SECONDS)
        with self._changed:
            self._resumes_at = 0.0
            self.settle(DRAIN_SECONDS)
            self._is_closing = True
            self._changed.notify_all()
        # A disk that hangs must not keep the process alive.
        self._thread.join(DRAIN_SECONDS)
        self._folder.close()

    @property
    def _has_work(self) -> bool:
        is_needed = self._unneeded or self._waiting or self._version != self._state.sessions.kept_version
        return bool(is_needed) and self._catalog is not None and time.monotonic() >= self._resumes_at

    def _put(self, key: str | bytes, session_id: str, hashes: tuple[bytes, ...]) -> None:
        self._waiting[key] = session_id, hashes
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
            self.counts.num_skipped += 1
        self._changed.notify_all()

    def _remove(self, names: Iterable[bytes]) -> None:
        self._unneeded.update(names)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                while not self._has_work and not self._is_closing:
                    pause = self._resumes_at - time.monotonic()
                    self._changed.wait(pause if pause > 0 else None)
                if (catalog := self._catalog) is None or self._is_closing:
                    return
                self._is_busy = True
            try:
                self._tidy(catalog)
                self._write_next(catalog)
                continue
            except OSError as error:
                catalog.files.note_error(error)
            except Exception:
                _log.exception("a prefix is not written to the disk")
            self.counts.num_skipped += 1
            self._resumes_at = time.monotonic() + PAUSE_SECONDS

    def _tidy(self, catalog: Catalog) -> None:
        """Write the list of sessions and remove what is not needed: the next store must not find what was dropped.
        Raises OSError; it is tried again then."""
        with self._state.lock:
            # Only this thread writes anew.
            names, self._unneeded = {each for each in self._unneeded if each not in catalog}, set()
            version = self._state.sessions.kept_version
            named = () if version == self._version else self._state.sessions.items()
            sessions = [SavedSession.of(name, session) for name, session in named if session.kept]
        try:
            if version != self._version:
                catalog.files.write_sessions(sessions)
                self._version = version
            for name in names:
                catalog.files.remove_column(name)
        except BaseException:
            with self._state.lock:
                self._remove(names)
            raise

    def _write_next(self, catalog: Catalog) -> None:
        """Write as much of a chain from its start as there is and fits, then its session. Raises OSError."""
        state = self._state
        with state.lock:
            if catalog is not self._catalog or not self._waiting:
                return
            _, (session_id, hashes) = self._waiting.popitem(last=False)
        num_there = 0
        while num_there < len(hashes) and self._write_column(catalog, hashes, num_there, bool(session_id)):
            num_there += 1
        with state.lock:
            if not session_id:
                self.counts.num_skipped += num_there < len(hashes)
                return
            session, kept = state.sessions.find(session_id), hashes[:num_there]
            if session is not None and session.hashes == hashes and all(name in catalog for name in kept):
                state.sessions.keep(session_id, kept or session.kept)
        self._tidy(catalog)

    def _write_column(
        self, catalog: Catalog, hashes: tuple[bytes, ...], place: int, of_session: bool
    ) -> bool:
        """Return whether a column is on the disk now."""
        state, name = self._state, hashes[place]
        with state.lock:
            if name in catalog:
                return True
            if (slabs := state.prefixes.find(name)) is None:
                return False
            self._remove(catalog.make_room(hashes, of_session))
            has_room = catalog.has_room
        self._tidy(catalog)
        if not has_room:
            return False
        copy = np.stack(state.bytes_of(slabs))
        if state.checksums.sums(slabs) is None:
            state.checksums.settle()
        with state.lock:
            # Those that were taken when the slabs were sealed.
            sums = state.checksums.sums(slabs) if state.prefixes.find(name) is slabs else None
        if sums is None or (checksums(copy) != sums).any():
            return False
        column = Column(name, hashes[place - 1] if place else None, sums)
        catalog.files.write_column(column, copy)
        with state.lock:
            if state.prefixes.find(name) is slabs:
                catalog.add(column)
                catalog.touch(hashes[: place + 1])
                return True
            # A prefix that was dropped in the meantime must not be found again.
            self._remove([name])
            return False
