"""The checksum of slabs and of index arrays: fast enough to be taken of everything that is shared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_WORD_BYTES = 8
# Words of a block; of these many blocks the sums are summed again.
_BLOCK_WORDS = 256
_BLOCK_BYTES = _WORD_BYTES * _BLOCK_WORDS
# Odd: a word that differs always differs in the sum, too.
_WEIGHTS = np.random.default_rng(0x5EED).integers(0, 1 << 63, _BLOCK_WORDS, np.uint64) * 2 + 1


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """64 bits of contiguous bytes uint8 [n], any n: sums of words by odd weights mod 2**64, of blocks and then of their
    sums, so whatever differs within one word is always found, and anything else but for once in about 2**60.

    Releases Python's lock; a core takes some 10 GB/s.
    """
    return int(checksums(data[None])[0])


def checksums(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """`checksum` of each row: contiguous uint8 [m, n] to uint64 [m]. Many at once take Python's lock rarely."""
    num_rows, sums = len(data), data
    while True:
        num_whole = sums.shape[1] // _BLOCK_BYTES * _BLOCK_BYTES
        parts = [_weighed(sums[:, :num_whole]).reshape(num_rows, -1)]
        if rest := sums.shape[1] - num_whole:
            last = np.zeros((num_rows, _BLOCK_BYTES), np.uint8)
            last[:, :rest] = sums[:, num_whole:]
            parts.append(_weighed(last)[:, None])
        blocks = np.concatenate(parts, axis=1)
        if blocks.shape[1] <= 1:
            return blocks.sum(axis=1)
        sums = blocks.view(np.uint8)


def _weighed(words: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """One sum of each block."""
    return np.einsum("ij,j->i", words.view(np.uint64).reshape(-1, _BLOCK_WORDS), _WEIGHTS)
