"""Files of slabs and sessions of one layout: written, read and checked."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_store.client.checksum import checksum
from kv_store.disk import session_file
from kv_store.disk.catalog import Unneeded
from kv_store.disk.column import Column, ColumnFormat
from kv_store.disk.errors import DamagedFile, ForeignFile
from kv_store.disk.folder import SESSION, SLABS, TierFolder
from kv_store.disk.session_file import SavedSession

_log = logging.getLogger(__name__)

# Of a file of any layout.
_MOST_BYTES = 1 << 50


@dataclass(slots=True)
class DiskCounts:
    """Since the start: see `DiskStats`."""

    written_bytes: int = 0
    read_bytes: int = 0
    num_skipped: int = 0
    num_errors: int = 0
    num_corrupt: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """A column that is there, and when it was used last, Unix time in seconds."""

    column: Column
    used_at: float


class TierFiles:
    """`counts` go on from one layout to the next."""

    def __init__(self, folder: TierFolder, layout: ColumnFormat, counts: DiskCounts) -> None:
        self._folder = folder
        self.layout = layout
        self.counts = counts

    def scan(self) -> tuple[list[Found], list[SavedSession]]:
        """What an earlier store left: of columns the headers are read. What is not ours to use is removed. Raises
        OSError."""
        columns: list[Found] = []
        sessions: list[SavedSession] = []
        num_foreign = 0
        for name, kind in list(self._folder.files()):
            try:
                if kind == SLABS:
                    columns.append(self._find(name))
                else:
                    sessions.append(self._session(name))
            except DamagedFile as error:
                self.note_corrupt(name, error)
                self._discard(name, kind)
            except ForeignFile:
                num_foreign += 1
                self._discard(name, kind)
            except OSError as error:
                # The others may be there.
                self._note_error("read", error)
        if num_foreign:
            _log.warning(
                "%d files of slabs in %s are of another layout or version, and were removed",
                num_foreign,
                self._folder.path,
            )
        return columns, sessions

    def write_column(self, column: Column, slabs: npt.NDArray[np.uint8]) -> None:
        """slabs: contiguous uint8 [num_layers, slab_bytes]. Raises OSError; nothing is left then."""
        self._folder.write(column.name, SLABS, [self.layout.header(column), slabs.data])
        self.counts.written_bytes += slabs.nbytes

    def read_column(self, name: bytes, slabs: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Into contiguous uint8 [slab_bytes] of each layer, which mean nothing where this raises: DamagedFile,
        ForeignFile, OSError."""
        with self._folder.opened(name, SLABS, self.layout.file_bytes, self.layout.file_bytes) as file:
            column = self.layout.read(file.read(self.layout.header_bytes), name)
            offset = self.layout.header_bytes
            for slab, expected in zip(slabs, column.sums, strict=True):
                file.read_into(slab.data, offset)
                offset += slab.nbytes
                # Of what is read now: nobody else may change it meanwhile.
                if checksum(slab) != int(expected):
                    raise DamagedFile("a slab in it is not what was written")
        # What was read is right, whatever a later store takes for its last use.
        with contextlib.suppress(OSError):
            self._folder.renew(name, SLABS)
        self.counts.read_bytes += offset - self.layout.header_bytes

    def write_session(self, session: SavedSession) -> None:
        """What it holds is on the disk by now, and stays there when the machine fails, as the session does. Raises
        OSError."""
        self._folder.write(session_file.file_name(session.name), SESSION, [session_file.to_bytes(session)])
        self._folder.sync()

    def remove(self, unneeded: Unneeded) -> None:
        """Raises OSError."""
        # A session's file goes first: none names slabs that are gone.
        for session in unneeded.sessions:
            self._folder.remove(session_file.file_name(session), SESSION)
        for name in unneeded.columns:
            self._folder.remove(name, SLABS)

    def note_corrupt(self, name: bytes, error: DamagedFile) -> None:
        self.counts.num_corrupt += 1
        _log.error("a file in %s is dropped (%s...): %s", self._folder.path, name.hex()[:16], error)

    def _discard(self, name: bytes, kind: str) -> None:
        try:
            self._folder.remove(name, kind)
        except OSError as error:
            self._note_error("removed", error)

    def _note_error(self, what: str, error: OSError) -> None:
        self.counts.num_errors += 1
        _log.error("a file in %s cannot be %s: %s", self._folder.path, what, error)

    def _find(self, name: bytes) -> Found:
        with self._folder.opened(name, SLABS, _MOST_BYTES, 1) as file:
            header = file.read(min(file.num_bytes, self.layout.header_bytes))
            column = self.layout.read(header, name)
            if file.num_bytes != self.layout.file_bytes:
                raise DamagedFile(f"it has {file.num_bytes} bytes of {self.layout.file_bytes}")
            return Found(column, file.used_at)

    def _session(self, name: bytes) -> SavedSession:
        with self._folder.opened(name, SESSION, session_file.MAX_BYTES) as file:
            return session_file.from_bytes(file.read(file.num_bytes), name)
