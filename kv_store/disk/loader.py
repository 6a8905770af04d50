"""Slabs on their way from files back to the arena, for prompts that wait for them."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from carrel.process.ready_threads import start_thread
from kv_store.disk.catalog import Catalog, Unneeded
from kv_store.disk.errors import DamagedFile, UnusableFile
from kv_store.disk.files import TierFiles
from kv_store.disk.turns import Turns
from kv_store.errors import OutOfSpace
from kv_store.state import StoreState

_log = logging.getLogger(__name__)

# A prompt waits so long at most for what is on the disk, and computes the rest.
WAIT_SECONDS = 10.0
# After so long nobody asks any more for what was loaded.
_FORGET_SECONDS = 60.0
# What this process or machine lacks for the moment: the file may be as it was.
_NOT_THE_DISKS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


@dataclass(slots=True, eq=False)
class Load:
    """A chain on its way: those of `hashes` that are not in the arena. owner: whose. catalog, files: of the layout that
    it has."""

    hashes: tuple[bytes, ...]
    owner: str
    catalog: Catalog
    files: TierFiles
    begun_at: float
    is_done: bool = False
    is_given_up: bool = False


class ChainLoader:
    """Loads one chain after another, on a thread of its own; owners take turns. Raises NoThreads.

    remove: takes files that are of no use. failed: is told of an error of the disk.
    """

    def __init__(
        self,
        state: StoreState,
        remove: Callable[[Unneeded], None],
        failed: Callable[[OSError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._remove = remove
        self._failed = failed
        self._clock = clock
        # By the last name of each; the store's lock guards them.
        self._loads: dict[bytes, Load] = {}
        self._waiting = Turns[Load]()
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = start_thread(self._run, "disk-read")

    def must_wait(self, hashes: tuple[bytes, ...], owner: str, catalog: Catalog, files: TierFiles) -> bool:
        """Whether more of this chain will be in the arena soon than is by now; starts to load it where it is on the
        disk. False once that has ended, or has taken too long. The caller holds the store's lock."""
        num_known = len(self._state.prefixes.known(hashes))
        num_there = self._count(hashes, num_known, catalog)
        if num_there == num_known:
            return False
        load = self._loads.get(hashes[num_there - 1])
        if load is None:
            # A disk that hangs holds up each prompt once at most.
            if any(each.is_given_up for each in self._loads.values()):
                return False
            # What it has stays for as long as it waits.
            self._state.prefixes.renew(hashes[:num_known])
            self._start(Load(hashes[:num_there], owner, catalog, files, self._clock()))
            return True
        if load.is_done:
            del self._loads[load.hashes[-1]]
            return False
        load.is_given_up |= self._clock() - load.begun_at > WAIT_SECONDS
        return not load.is_given_up

    def close(self, seconds: float) -> None:
        with self._changed:
            self._is_closing = True
            self._waiting.clear()
            self._changed.notify_all()
        with self._state.lock:
            self.give_up()
        self._thread.join(seconds)

    def give_up(self) -> None:
        """Nobody wants what is on its way. The caller holds the store's lock."""
        # One that is done for itself would stay, as one of a disk that hangs, and nothing would be read any more.
        self._loads = {name: load for name, load in self._loads.items() if not load.is_done}
        for load in self._loads.values():
            load.is_given_up = True

    def _count(self, hashes: tuple[bytes, ...], num_known: int, catalog: Catalog) -> int:
        """First hashes that are in the arena or on the disk."""
        prefixes = self._state.prefixes
        place = num_known
        while place < len(hashes) and (hashes[place] in catalog or prefixes.find(hashes[place]) is not None):
            place += 1
        return place

    def _start(self, load: Load) -> None:
        now = self._clock()
        self._loads = {
            name: each
            for name, each in self._loads.items()
            if not (each.is_done and now - each.begun_at > _FORGET_SECONDS)
        }
        self._loads[load.hashes[-1]] = load
        with self._changed:
            self._waiting.put(load.owner, load)
            self._changed.notify_all()

    def _run(self) -> None:
        while (load := self._next()) is not None:
            try:
                self._load(load)
            except OSError as error:
                self._failed(error)
            except Exception:
                _log.exception("a prefix is not read from the disk")
            finally:
                with self._state.lock:
                    if load.is_given_up:
                        self._loads.pop(load.hashes[-1], None)
                    load.is_done = True

    def _next(self) -> Load | None:
        with self._changed:
            while not self._waiting and not self._is_closing:
                self._changed.wait()
            return None if self._is_closing else self._waiting.next()

    def _load(self, load: Load) -> None:
        """Raises OSError."""
        after: npt.NDArray[np.int32] | None = None
        for place in range(len(load.hashes)):
            with self._state.lock:
                found = self._state.prefixes.lookup(load.hashes[: place + 1])
                if len(found) > place:
                    after = found[place]
                    continue
                slabs = self._room(load, place, after) if len(found) == place else None
            if slabs is None:
                return
            try:
                is_read = self._read(load, place, slabs)
                with self._state.lock:
                    if not is_read or not self._list(load, place, slabs):
                        return
            finally:
                with self._state.lock:
                    self._state.allocator.release(slabs)
            after = slabs

    def _room(
        self, load: Load, place: int, after: npt.NDArray[np.int32] | None
    ) -> npt.NDArray[np.int32] | None:
        """Slabs int32 [num_layers], held by us; None where nobody waits for them any more, or room is short."""
        state, num_layers = self._state, load.files.layout.num_layers
        if load.is_given_up or load.hashes[place] not in load.catalog:
            return None
        try:
            # As much stays for those that run and grow while we hold these.
            state.make_room(2 * num_layers, "what is read from the disk", load.owner)
        except OutOfSpace:
            return None
        return state.allocator.allocate(num_layers, 1, after, load.owner)[:, 0]

    def _read(self, load: Load, place: int, slabs: npt.NDArray[np.int32]) -> bool:
        """Whether the slabs hold what was written once. Raises OSError."""
        state, name = self._state, load.hashes[place]
        data = state.arena.data.reshape(-1)
        begins = [int(slab) * state.slab_bytes for slab in slabs]
        try:
            load.files.read_column(name, [data[begin : begin + state.slab_bytes] for begin in begins])
            return True
        except DamagedFile as error:
            load.files.note_corrupt(name, error)
        except (UnusableFile, FileNotFoundError):
            pass
        except OSError as error:
            if error.errno not in _NOT_THE_DISKS:
                self._forget(load, name)
            raise
        self._forget(load, name)
        return False

    def _forget(self, load: Load, name: bytes) -> None:
        with self._state.lock:
            unneeded = load.catalog.remove(name)
            held = {each: load.catalog.held(each) for each in load.catalog.sessions}
            self._state.sessions.note_kept({**held, **dict.fromkeys(unneeded.sessions, ())})
        self._remove(unneeded)

    def _list(self, load: Load, place: int, slabs: npt.NDArray[np.int32]) -> bool:
        """Let others find a column that was read; False where what comes before it, or itself, is wanted no more."""
        state, hashes = self._state, load.hashes[: place + 1]
        found = state.prefixes.lookup(hashes)
        if len(found) != place or hashes[-1] not in load.catalog or load.is_given_up:
            return len(found) > place
        new = state.prefixes.publish(hashes, np.stack([*found, slabs], axis=1))
        state.checksums.seal(new)
        load.catalog.touch(hashes)
        counts, num_tokens = load.files.counts, state.geometry.tokens_per_slab
        counts.lookup_tokens += num_tokens
        counts.hit_tokens += num_tokens
        return True
