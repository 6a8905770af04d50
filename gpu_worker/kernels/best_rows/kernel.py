"""The best rows in Triton: a search for the last of them, and all that reach it, in order. Nothing is sorted.

Heads of up to `MOST_IN_ONE` rows take one launch, `take_best`, a program a head: to queue more would take the host
longer than one processor takes for a head. It counts which rows reach three numbers at a time, 16 times for the first
score, and, if any tie there, 16 times for the second; of 32K rows it reads most from its L1 cache.

Longer heads take a launch for each eight bits of the scores, and two to write. There the two scores of a row are the
digits of one number, the first score's above the second's.

1. `count_digit`, grid (H, chunks), once for each of four digits of `first` and four of `second`: of the rows that begin
   with the digits found so far, how many have which next digit. Each program finds
   the digits so far from the counts that the launch before has left.
2. `tally`, grid (H, chunks): how many rows of a chunk are above the number that is found, and how many at it.
3. `write_best`, grid (H, chunks): a chunk's rows at their ranks, after those of the chunks before it. Of the rows at
   the number the last ones are taken.

The scores, 8 bytes a row, are read ten times, from L2 but for the first. The result does not depend on the order in
which programs run: they add whole numbers.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.best_rows.programs import (
    NUM_BINS,
    NUM_DIGITS,
    STATE,
    count_digit,
    take_best,
    tally,
    write_best,
)

TILE = 2048
NUM_WARPS = 4
# Rows of a head that one program takes, some at a time: in 0.23 ms, where ten launches take the host 0.35 (H200).
MOST_IN_ONE = 32768
TILE_OF_ONE, WARPS_OF_ONE = 4096, 16


def best_rows(first: Tensor, counts: Tensor | None, width: int, second: Tensor | None = None) -> Tensor:
    """See the reference. All on one CUDA device. Raises ValueError for scores of another dtype."""
    if first.shape[1] > MOST_IN_ONE:
        return search_by_digits(first, counts, width, second)
    keys, best = _checked(first, width, second)
    if best.numel() and first.shape[1]:
        counts = None if counts is None else counts.contiguous()
        take_best[(len(first),)](
            *keys, counts, best, first.shape[1], width, TILE=TILE_OF_ONE, num_warps=WARPS_OF_ONE
        )
    return best


def search_by_digits(
    first: Tensor, counts: Tensor | None, width: int, second: Tensor | None = None
) -> Tensor:
    """`best_rows` by many short launches, which in a CUDA graph take less time than one program a head."""
    keys, best = _checked(first, width, second)
    num_heads, num_rows = first.shape
    if not (best.numel() and num_rows):
        return best
    counts = None if counts is None else counts.contiguous()
    num_digits = NUM_DIGITS.value // (2 if second is None else 1)
    num_chunks = triton.cdiv(num_rows, TILE)
    # Counts of digits, which begin at 0, what is found of each head, and counts of chunks.
    sizes_of = (num_digits * NUM_BINS.value, (num_digits + 1) * STATE.value, 2 * num_chunks)
    parts = [num_heads * size for size in sizes_of]
    bins, found, in_chunks = torch.zeros(sum(parts), dtype=torch.int32, device=first.device).split(parts)
    operands = (keys[0], keys[0] if keys[1] is None else keys[1], counts, bins, found, num_rows, width)
    sizes = {"ALL_DIGITS": num_digits, "TILE": TILE, "num_warps": NUM_WARPS}
    grid = (num_heads, num_chunks)
    for digit in range(num_digits):
        count_digit[grid](*operands, DIGIT=digit, **sizes)
    tally[grid](*operands, in_chunks, **sizes)
    write_best[grid](*operands, in_chunks, best, **sizes)
    return best


def _checked(first: Tensor, width: int, second: Tensor | None) -> tuple[tuple[Tensor, Tensor | None], Tensor]:
    """Contiguous scores, and memory for the best, which is -1 where there are no rows."""
    for scores in (first,) if second is None else (first, second):
        if scores.dtype != torch.float32:
            raise ValueError(f"best_rows: scores are {scores.dtype}, not float32")
    shape, device = (len(first), width), first.device
    if first.shape[1]:
        best = torch.empty(shape, dtype=torch.int64, device=device)
    else:
        best = torch.full(shape, -1, device=device)
    return (_rows_of(first), None if second is None else _rows_of(second)), best


def _rows_of(scores: Tensor) -> Tensor:
    # Asked first: also what does nothing takes the host a while.
    return scores if scores.is_contiguous() else scores.contiguous()
