"""Pieces joined in one launch: every output is read once and the sum written once, bound by memory. `join_past` takes
any number of pieces as one tensor, `join_pieces` each by itself.

A program has some rows of one (token, head) each. Eight pieces of 8,192 queries of 32 heads are 512 MiB.
"""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program's tile.
TILE = 2048


def join_pieces(log_sums: Tensor, *outputs: Tensor) -> Tensor:
    """See the reference. Outputs that are not contiguous are copied first."""
    num_tokens, num_heads, head_dim = outputs[0].shape
    joined = torch.empty(outputs[0].shape, dtype=outputs[0].dtype, device=log_sums.device)
    if joined.numel():
        width = triton.next_power_of_2(head_dim)
        rows = max(1, TILE // width)
        _join_pieces[(triton.cdiv(num_tokens * num_heads, rows),)](
            log_sums.contiguous(), tuple(output.contiguous() for output in outputs), joined, num_tokens, num_heads,
            HEAD_DIM=head_dim, WIDTH=width, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return joined


def join_past(log_sums: Tensor, outputs: Tensor, own_sums: Tensor, own: Tensor) -> Tensor:
    """See the reference. What is not contiguous is copied first."""
    num_tokens, num_heads, head_dim = own.shape
    joined = torch.empty(own.shape, dtype=own.dtype, device=own.device)
    if joined.numel():
        width = triton.next_power_of_2(head_dim)
        rows = max(1, TILE // width)
        _join_past[(triton.cdiv(num_tokens * num_heads, rows),)](
            log_sums.contiguous(), outputs.contiguous(), own_sums.contiguous(), own.contiguous(), joined,
            num_tokens, outputs.shape[0],
            GROUP=num_heads // outputs.shape[2], NUM_HEADS=num_heads, HEAD_DIM=head_dim, WIDTH=width, ROWS=rows,
            num_warps=4,
        )  # fmt: skip
    return joined


@triton.jit(do_not_specialize=["num_tokens", "num_pieces"])
def _join_past(
    log_sums, outputs, own_sums, own, joined, num_tokens, num_pieces,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_tokens * NUM_HEADS
    token, head = row // NUM_HEADS, row % NUM_HEADS
    kv_head, query = head // GROUP, head % GROUP * num_tokens + token
    num_kv_heads: tl.constexpr = NUM_HEADS // GROUP
    num_queries = GROUP * num_tokens
    own_sum = tl.load(own_sums + head * num_tokens + token, mask=is_row, other=0.0)
    log_sums += kv_head * num_queries + query
    most = own_sum
    for piece in range(num_pieces):
        most = tl.maximum(
            most, tl.load(log_sums + piece * num_kv_heads * num_queries, mask=is_row, other=0.0)
        )
    dims = tl.arange(0, WIDTH)[None, :]
    inside = is_row[:, None] & (dims < HEAD_DIM)
    places = row.to(tl.int64)[:, None] * HEAD_DIM + dims
    total = tl.exp(own_sum - most)
    summed = total[:, None] * tl.load(own + places, mask=inside, other=0.0).to(tl.float32)
    for piece in range(num_pieces):
        weight = tl.exp(tl.load(log_sums + piece * num_kv_heads * num_queries, mask=is_row, other=0.0) - most)
        of_piece = (piece * num_queries + query).to(tl.int64) * num_kv_heads + kv_head
        output = tl.load(outputs + of_piece[:, None] * HEAD_DIM + dims, mask=inside, other=0.0).to(tl.float32)
        summed += weight[:, None] * output
        total += weight
    tl.store(joined + places, (summed / total[:, None]).to(joined.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _join_pieces(
    log_sums, outputs, joined, num_tokens, num_heads,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    num_rows = num_tokens * num_heads
    is_row = row < num_rows
    log_sums += row % num_heads * num_tokens + row // num_heads
    most = tl.full([ROWS], float("-inf"), tl.float32)
    for piece in tl.static_range(len(outputs)):
        most = tl.maximum(most, tl.load(log_sums + piece * num_rows, mask=is_row, other=0.0))
    dims = tl.arange(0, WIDTH)[None, :]
    places = row.to(tl.int64)[:, None] * HEAD_DIM + dims
    inside = is_row[:, None] & (dims < HEAD_DIM)
    summed = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for piece in tl.static_range(len(outputs)):
        weight = tl.exp(tl.load(log_sums + piece * num_rows, mask=is_row, other=0.0) - most)
        output = tl.load(outputs[piece] + places, mask=inside, other=0.0).to(tl.float32)
        summed += weight[:, None] * output
        total += weight
    tl.store(joined + places, (summed / total[:, None]).to(joined.dtype.element_ty), mask=inside)
