"""Files of the disk tier: columns, the slabs of one prefix hash in all layers behind a header, and a list of sessions.

A header is a fingerprint of layout and edition, the column's name and the one before it in its chain (zeros for the
first), a checksum of each slab, and a digest of all this, padded with zeros to whole pages.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from io import BufferedReader

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from carrel.process.version import Edition
from kv_store.client.layout import LAYOUT_VERSION, SlabGeometry
from kv_store.client.stats import DiskStats
from kv_store.disk.folder import SESSIONS, TierFolder
from kv_store.sessions import Session

_log = logging.getLogger(__name__)

_PAGE_BYTES = 4096
_DIGEST_BYTES = 32
_NO_NAME = bytes(32)
_FORMAT = 3
_SLABS = ".slabs"


class DamagedFile(Exception):
    """A file that is not what was written: torn, changed, or not one of ours."""


class ForeignFile(DamagedFile):
    """A file that another layout or edition wrote."""


@dataclass(frozen=True, slots=True)
class Column:
    """The content of a header. before: the name before this one in its chain, None for the first. sums: uint64
    [num_layers], `checksums` of each slab. used_at: last use, Unix time in seconds."""

    name: bytes
    before: bytes | None
    sums: npt.NDArray[np.uint64]
    used_at: float = 0.0


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A session in the list. last: name of the last column that it keeps, each of which says what precedes it. Other
    fields as in `Session`."""

    name: str
    owner: str
    label: str
    created_at: float
    used_at: float
    pinned_until: float
    last: bytes

    @classmethod
    def of(cls, name: str, session: Session) -> SavedSession:
        """A session that keeps something on the disk."""
        times = session.created_at, session.used_at, session.pinned_until
        return cls(name, session.owner, session.label, *times, session.kept[-1])

    def restored(self, hashes: tuple[bytes, ...]) -> Session:
        """The session, which keeps these on the disk and has no slabs."""
        times, no_slabs = (self.created_at, self.used_at, self.pinned_until), np.empty(0, np.int32)
        return Session(self.owner, self.label, hashes, no_slabs, *times, hashes)


class TierFiles:
    """The files of one layout and edition. `counts` continue from one layout to the next."""

    def __init__(
        self, folder: TierFolder, geometry: SlabGeometry, edition: Edition, counts: DiskStats
    ) -> None:
        self._folder = folder
        self.geometry = geometry
        self.counts = counts
        self.num_layers = geometry.layout.num_layers
        # One store must not read what another wrote unless all of these are equal.
        facts = (_FORMAT, LAYOUT_VERSION, astuple(geometry.layout), geometry.slab_bytes, *astuple(edition))
        self._fingerprint = _digest(repr(facts).encode())
        self._used = 3 * 32 + 8 * self.num_layers
        self._header_bytes = -(-(self._used + _DIGEST_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        self.column_bytes = self._header_bytes + self.num_layers * geometry.slab_bytes

    def scan(self) -> tuple[list[Column], list[SavedSession]]:
        """Read the headers and the sessions that an earlier store left, and remove what cannot be used."""
        columns, sessions, names = list[Column](), list[SavedSession](), list[str]()
        try:
            names = self._folder.names()
        except OSError as error:
            self.note_error(error)
        for name in names:
            try:
                with self._folder.open(name) as file:
                    if name == SESSIONS:
                        sessions = self._read_sessions(file)
                    else:
                        columns.append(self._read_header(file, bytes.fromhex(name.removesuffix(_SLABS))))
            except ForeignFile:
                self._remove(name)
            except DamagedFile as error:
                self._drop(name, error)
            except OSError as error:
                self.note_error(error)
        return columns, sessions

    def write_column(self, column: Column, slabs: npt.NDArray[np.uint8]) -> None:
        """slabs: contiguous uint8 [num_layers, slab_bytes]. Raises OSError; nothing is left then."""
        names = column.name + (column.before or _NO_NAME)
        used = self._fingerprint + names + column.sums.astype("<u8").tobytes()
        header = (used + _digest(used)).ljust(self._header_bytes, b"\0")
        self._folder.write(column.name.hex() + _SLABS, [header, slabs.data])
        self.counts.written_bytes += slabs.nbytes

    def read_column(self, name: bytes, slabs: Sequence[npt.NDArray[np.uint8]]) -> bool:
        """Read into contiguous uint8 [slab_bytes] of each layer; False where the file is not what was written, and the
        slabs mean nothing then. Raises OSError."""
        file_name = name.hex() + _SLABS
        try:
            with self._folder.open(file_name) as file:
                column = self._read_header(file, name)
                for slab, expected in zip(slabs, column.sums, strict=True):
                    if file.readinto(slab.data) != slab.nbytes or xxh3_64_intdigest(slab.data) != int(
                        expected
                    ):
                        raise DamagedFile("a slab in it is not what was written")
        except DamagedFile as error:
            self._drop(file_name, error)
            return False
        self.counts.read_bytes += sum(slab.nbytes for slab in slabs)
        return True

    def remove_column(self, name: bytes) -> None:
        """Raises OSError."""
        self._folder.remove(name.hex() + _SLABS)

    def write_sessions(self, sessions: list[SavedSession]) -> None:
        """Replace the list, which outlives a failure of the machine from here on. Raises OSError."""
        text = json.dumps([{**asdict(each), "last": each.last.hex()} for each in sessions]).encode()
        self._folder.write(SESSIONS, [_digest(text), text])
        self._folder.sync()

    def note_error(self, error: OSError) -> None:
        """Count and log an error of the disk."""
        self.counts.num_errors += 1
        _log.error("the disk of --kv-store-path failed: %s; what was to be kept or found is left out", error)

    def _drop(self, name: str, error: DamagedFile) -> None:
        self.counts.num_corrupt += 1
        _log.error("%s in %s is removed: %s", name, self._folder.path, error)
        self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            self._folder.remove(name)
        except OSError as error:
            self.note_error(error)

    def _read_sessions(self, file: BufferedReader) -> list[SavedSession]:
        """Raises DamagedFile, OSError."""
        digest, text = file.read(_DIGEST_BYTES), file.read()
        if digest != _digest(text):
            raise DamagedFile("the list of sessions is not what was written")
        try:
            found = json.loads(text)
            return [SavedSession(**{**each, "last": bytes.fromhex(each["last"])}) for each in found]
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile("the list of sessions has other fields") from error

    def _read_header(self, file: BufferedReader, name: bytes) -> Column:
        """Raises DamagedFile, OSError."""
        status, header = os.fstat(file.fileno()), file.read(self._header_bytes)
        if not header.startswith(self._fingerprint):
            raise ForeignFile("another layout or edition wrote it")
        used, digest = header[: self._used], header[self._used : self._used + _DIGEST_BYTES]
        if digest != _digest(used) or used[32:64] != name or status.st_size != self.column_bytes:
            raise DamagedFile("its name, header or size is not what was written")
        before, sums = used[64:96], np.frombuffer(used, "<u8", offset=96).astype(np.uint64)
        return Column(name, None if before == _NO_NAME else before, sums, status.st_mtime)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
