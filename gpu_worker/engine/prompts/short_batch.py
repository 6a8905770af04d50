"""Short prompts behind one another, padded to one of few numbers of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

# Of tokens. With more, a GPU computes for about as long as the host needs to tell it layer by layer.
BUCKETS = (*range(64, 641, 64), 768, 896, 1024)
MAX_PROMPTS = 8


def buckets_within(num_tokens: int) -> tuple[int, ...]:
    """Those that prompts of at most so many tokens need."""
    return BUCKETS[: bisect_left(BUCKETS, num_tokens) + 1]


@dataclass(frozen=True, slots=True)
class ShortBatch:
    """counts: tokens of each prompt. num_tokens: with padding, one of `BUCKETS`. table: int64 [2 num_tokens +
    MAX_PROMPTS + 1], the tokens' ids, their positions, and where each prompt begins and the last one ends; prompts that
    are not there are empty ones at the end. Padding has id and position 0."""

    counts: tuple[int, ...]
    num_tokens: int
    table: npt.NDArray[np.int64]

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]]) -> ShortBatch:
        """prompts: token ids; at most MAX_PROMPTS, of at most the largest bucket's tokens together."""
        counts = tuple(len(prompt) for prompt in prompts)
        total = sum(counts)
        size = BUCKETS[bisect_left(BUCKETS, total)]
        table = np.zeros(2 * size + MAX_PROMPTS + 1, np.int64)
        table[:total] = np.concatenate(prompts)
        table[size : size + total] = np.concatenate([np.arange(count) for count in counts])
        table[2 * size :] = total
        table[2 * size : 2 * size + len(counts)] = [0, *accumulate(counts[:-1])]
        return cls(counts, size, table)
