"""A file of slabs: those of one prefix hash in all layers, behind a header that says what they are.

The header is the fields below, the owner's name, a checksum of each slab, and a digest of all this, padded with zeros
to a whole number of pages. The slabs follow, layer by layer.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from carrel.process.version import Edition
from kv_store.client.layout import LAYOUT_VERSION, SlabGeometry
from kv_store.disk.errors import DamagedFile, ForeignFile
from kv_store.prefixes import HASH_BYTES

MAGIC = b"carrel slabs 1\0\0"
_PAGE_BYTES = 4096
_DIGEST_BYTES = 32
# magic, fingerprint, name, name before it (zeros: the first of its chain), place in its chain, length of the owner's
_FIELDS = struct.Struct("<16s32s32s32sQH")
# Of 256 characters in UTF-8.
_OWNER_BYTES = 1024
# Of the header; files of another are another layout's.
_FORMAT = 2
_NO_NAME = bytes(HASH_BYTES)


def fingerprint(geometry: SlabGeometry, edition: Edition) -> bytes:
    """Of what must be equal for one store to read what another wrote: 32 bytes."""
    facts = (
        _FORMAT,
        LAYOUT_VERSION,
        astuple(geometry.layout),
        geometry.slab_bytes,
        edition.version,
        edition.messages,
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Column:
    """What a header says. before: the name that comes before this in its chain, None for the first. place: how many do.
    owner: whose it is, at most 256 characters. sums: uint64 [num_layers], `checksums` of each slab."""

    name: bytes
    before: bytes | None
    place: int
    owner: str
    sums: npt.NDArray[np.uint64]


class ColumnFormat:
    """Of the files of one layout and edition. header_bytes, file_bytes: of each."""

    def __init__(self, geometry: SlabGeometry, edition: Edition) -> None:
        self._fingerprint = fingerprint(geometry, edition)
        self.num_layers = geometry.layout.num_layers
        self.slab_bytes = geometry.slab_bytes
        self._sums_at = _FIELDS.size + _OWNER_BYTES
        self._used = self._sums_at + 8 * self.num_layers
        self.header_bytes = -(-(self._used + _DIGEST_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        self.file_bytes = self.header_bytes + self.num_layers * self.slab_bytes

    def header(self, column: Column) -> bytes:
        before = column.before or _NO_NAME
        owner = column.owner.encode()
        fields = _FIELDS.pack(MAGIC, self._fingerprint, column.name, before, column.place, len(owner))
        used = fields + owner.ljust(_OWNER_BYTES, b"\0") + column.sums.astype("<u8").tobytes()
        return (used + _digest(used)).ljust(self.header_bytes, b"\0")

    def read(self, header: bytes, name: bytes) -> Column:
        """What the file of this name holds. Raises ForeignFile where another layout or edition wrote it, DamagedFile
        where it is not what was written."""
        if header[: len(MAGIC)] != MAGIC or len(header) < _FIELDS.size:
            raise DamagedFile("it does not begin as a file of slabs does")
        _, writer, found, before, place, owner_bytes = _FIELDS.unpack_from(header)
        if writer != self._fingerprint:
            raise ForeignFile("another layout or edition wrote it")
        used, digest = header[: self._used], header[self._used : self._used + _DIGEST_BYTES]
        if len(header) != self.header_bytes or digest != _digest(used) or found != name:
            raise DamagedFile("its header is not what was written")
        if (place == 0) != (before == _NO_NAME):
            raise DamagedFile("its place in its chain cannot be")
        try:
            owner = used[_FIELDS.size : _FIELDS.size + min(owner_bytes, _OWNER_BYTES)].decode()
        except UnicodeDecodeError as error:
            raise DamagedFile("its owner's name is none") from error
        sums = np.frombuffer(used, "<u8", self.num_layers, self._sums_at).astype(np.uint64)
        return Column(name, before if place else None, place, owner, sums)


def _digest(used: bytes) -> bytes:
    return hashlib.blake2b(used, digest_size=_DIGEST_BYTES).digest()
