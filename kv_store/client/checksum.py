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
    sums = data
    while True:
        num_whole = sums.size // _BLOCK_BYTES * _BLOCK_BYTES
        parts = [np.einsum("ij,j->i", sums[:num_whole].view(np.uint64).reshape(-1, _BLOCK_WORDS), _WEIGHTS)]
        if rest := sums.size - num_whole:
            last = np.zeros(_BLOCK_BYTES, np.uint8)
            last[:rest] = sums[num_whole:]
            parts.append(np.einsum("j,j->", last.view(np.uint64), _WEIGHTS).reshape(1))
        blocks = np.concatenate(parts)
        if blocks.size <= 1:
            return int(blocks.sum())
        sums = blocks.view(np.uint8)
