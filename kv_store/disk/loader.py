"""The thread that reads columns from the disk back to the arena, for prompts that wait for them."""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import dataclass
from itertools import takewhile
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from carrel.process.ready_threads import start_thread
from kv_store.client.errors import StoreFull
from kv_store.disk.catalog import Catalog
from kv_store.state import StoreState

_log = logging.getLogger(__name__)

# A prompt waits for the disk for so long at most, and computes the rest.
WAIT_SECONDS = 10.0
# No prompt asks for a load after so long.
_FORGET_SECONDS = 60.0
# What this process or machine lacks for the moment: the file may be as it was.
_NOT_THE_DISKS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


@dataclass(slots=True, eq=False)
class Load:
    """A chain to read, as far as it is not in the arena."""

    hashes: tuple[bytes, ...]
    owner: str
    catalog: Catalog
    begun_at: float
    is_done: bool = False

    @property
    def is_late(self) -> bool:
        return not self.is_done and time.monotonic() - self.begun_at > WAIT_SECONDS


class ChainLoader:
    """Reads one chain after another. Raises NoThreads."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        # by the last name of each
        self._loads: dict[bytes, Load] = {}
        self._waiting: SimpleQueue[Load | None] = SimpleQueue()
        self._is_closing = False
        self._thread = start_thread(self._run, "disk-read")

    def must_wait(self, hashes: tuple[bytes, ...], owner: str, catalog: Catalog) -> bool:
        """Return whether more of this chain will be in the arena soon than is now; starts to read it from the disk.
        False once that has ended, or has taken too long. The caller holds the store's lock."""
        prefixes, now = self._state.prefixes, time.monotonic()
        catalog.touch(hashes)
        num_known = len(prefixes.known(hashes))
        is_there = (name in catalog or prefixes.find(name) is not None for name in hashes[num_known:])
        num_there = num_known + sum(takewhile(bool, is_there))
        if num_there == num_known:
            return False
        self._loads = {
            key: each for key, each in self._loads.items() if now - each.begun_at < _FORGET_SECONDS
        }
        load = self._loads.get(hashes[num_there - 1])
        if load is None:
            # A disk that hangs holds up each prompt once at most.
            if any(each.is_late for each in self._loads.values()):
                return False
            # What the arena has stays for as long as the prompt waits.
            prefixes.renew(hashes[:num_known])
            load = Load(hashes[:num_there], owner, catalog, now)
            self._loads[load.hashes[-1]] = load
            self._waiting.put(load)
        elif load.is_done:
            del self._loads[load.hashes[-1]]
        return not (load.is_done or load.is_late)

    def close(self, seconds: float) -> None:
        """End, and read no more for prompts that wait."""
        self._is_closing = True
        self._waiting.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        for load in iter(self._waiting.get, None):
            try:
                all(self._load(load, place) for place in range(len(load.hashes)))
            except OSError as error:
                load.catalog.files.note_error(error)
            except Exception:
                _log.exception("a prefix is not read from the disk")
            load.is_done = True

    def _load(self, load: Load, place: int) -> bool:
        """Read the column at a place of a chain. False: what follows is not wanted or cannot be had. Raises OSError."""
        state, catalog, hashes = self._state, load.catalog, load.hashes[: place + 1]
        with state.lock:
            found = state.prefixes.lookup(hashes)
            if len(found) != place or load.is_late or self._is_closing or hashes[-1] not in catalog:
                return len(found) > place
            num_layers = catalog.files.num_layers
            try:
                # As much stays for those that run and grow while these slabs are held.
                state.make_room(2 * num_layers, "what is read from the disk", load.owner)
            except StoreFull:
                return False
            after = found[-1] if found else None
            slabs = state.allocator.allocate(num_layers, 1, after, load.owner)[:, 0]
        try:
            is_read = self._read(catalog, hashes[-1], slabs)
            with state.lock:
                found = state.prefixes.lookup(hashes)
                if len(found) != place or not is_read or hashes[-1] not in catalog:
                    return len(found) > place
                state.checksums.seal(state.prefixes.publish(hashes, np.stack([*found, slabs], axis=1)))
                catalog.touch(hashes)
                catalog.files.counts.lookup_tokens += state.geometry.tokens_per_slab
                catalog.files.counts.hit_tokens += state.geometry.tokens_per_slab
                return True
        finally:
            with state.lock:
                state.allocator.release(slabs)

    def _read(self, catalog: Catalog, name: bytes, slabs: npt.NDArray[np.int32]) -> bool:
        """Return whether the slabs hold now what was written. Raises OSError where the file may be as it was."""
        try:
            if catalog.files.read_column(name, self._state.bytes_of(slabs)):
                return True
        except OSError as error:
            if error.errno in _NOT_THE_DISKS:
                raise
            catalog.files.note_error(error)
        with self._state.lock:
            catalog.lose(name)
        return False
