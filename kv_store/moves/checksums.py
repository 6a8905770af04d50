"""What guards a move: a CRC-32 of each chunk, and a digest of all of these in their order."""

from __future__ import annotations

import hashlib
import struct

_DIGEST_BYTES = 16
_CHECKSUM = struct.Struct("<I")


class Checksums:
    """The digest changes with a chunk that is altered, missing, repeated or out of place."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(self, checksum: int) -> None:
        """The next chunk's."""
        self._digest.update(_CHECKSUM.pack(checksum))

    def digest(self) -> bytes:
        return self._digest.digest()
