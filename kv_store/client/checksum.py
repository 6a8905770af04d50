"""The checksum of slabs and of index arrays: fast enough to be taken of everything that is shared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """64 bits (XXH3) of contiguous bytes uint8 [n], any n: it finds what broke, not who broke it on purpose.

    Releases Python's lock; a core takes them about as fast as it reads memory.
    """
    return xxh3_64_intdigest(data.data)


def checksums(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """`checksum` of each row: contiguous uint8 [m, n] to uint64 [m]."""
    return np.fromiter(map(checksum, data), np.uint64, len(data))
