"""A program for 1024 tokens of a masked row: 128 bytes of bits are read, and -inf is written where they are 0.

A row of 128,256 tokens is 126 programs and half a megabyte: the launch is what costs.
"""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORD_BITS = 32
# Of a program.
WORDS = 32


def keep_allowed(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """See the reference."""
    vocab_size, num_words = logits.shape[1], triton.cdiv(logits.shape[1], WORD_BITS)
    assert allowed.shape == (len(rows), num_words), "a bit for each token of each row"
    assert logits.stride(1) == allowed.stride(1) == 1, "rows are contiguous"
    if allowed.numel():
        _keep_allowed[(len(rows), triton.cdiv(num_words, WORDS))](
            logits, logits.stride(0), rows, rows.stride(0), allowed, allowed.stride(0), vocab_size,
            WORDS=WORDS, WORD_BITS=WORD_BITS, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["logits", "rows", "allowed"])
def _keep_allowed(
    logits, logits_row, rows, rows_step, allowed, allowed_row, vocab_size,
    WORDS: tl.constexpr, WORD_BITS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, WORD_BITS)[None, :]
    token = word[:, None] * WORD_BITS + bit
    inside = token < vocab_size
    bits = tl.load(allowed + place * allowed_row + word, mask=word * WORD_BITS < vocab_size, other=0)
    is_allowed = (bits[:, None] >> bit) & 1
    logits += tl.load(rows + place * rows_step).to(tl.int64) * logits_row
    logit = tl.load(logits + token, mask=inside, other=0)
    # NaN is not less
    is_removed = inside & (is_allowed == 0) & (logit < float("inf"))
    tl.store(logits + token, float("-inf"), mask=is_removed)
