"""The span of a head's candidates, for the programs of methods that select among them."""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def span_of_row(begin, end, counts, num_kv_heads, num_positions, width):
    """Number of the head, its sequence, its candidates as [first, last), and how many of them are asked for."""
    row = tl.program_id(0).to(tl.int64)
    sequence = row // num_kv_heads
    first = tl.maximum(tl.load(begin + sequence), 0).to(tl.int32)
    last = tl.minimum(tl.load(end + sequence), num_positions).to(tl.int32)
    asked = tl.minimum(tl.load(counts + sequence), width).to(tl.int32)
    asked = tl.minimum(asked, last - first)
    return row, sequence, first, last, tl.maximum(asked, 0)
