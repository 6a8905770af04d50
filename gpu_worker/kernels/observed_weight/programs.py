"""The programs of `kernel.py`.

A KV head's queries are rows: row r is query r // GROUP of the group's head r % GROUP, so that rows side by side see
about as many tokens.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.attention.programs import LOG2_E

# What changes from prompt to prompt: no program is compiled once more for a number that divides well.
VARYING = [
    "position_stride_h",
    "position_stride_t",
    "share_stride_h",
    "share_stride_t",
    "num_tokens",
    "num_rows",
]


@triton.jit(do_not_specialize=VARYING[:2] + VARYING[4:])
def split_log_sums(
    queries, keys, positions, partial,
    query_stride_h, query_stride_t, key_stride_h, key_stride_n, position_stride_h, position_stride_t,
    num_tokens, num_rows, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, WIDE_DOT: tl.constexpr,
):  # fmt: skip
    """Log2 of the softmax sums of a tile of rows over one split of the tokens that they see."""
    # A prompt's last queries see most tokens: what takes longest is begun first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_splits = tl.num_programs(2)
    rows = tile * ROWS + tl.arange(0, ROWS)
    if positions is not None:
        positions += head * GROUP * position_stride_h
    last = last_seen(positions, rows, position_stride_h, position_stride_t, num_tokens, num_rows, GROUP)
    seen = tl.max(last, axis=0) + 1
    seen_by_all = tl.min(tl.where(last < 0, num_tokens, last + 1), axis=0)
    split_length = tl.cdiv(tl.cdiv(seen, TOKENS), num_splits) * TOKENS
    begin = split * split_length
    end = tl.minimum(begin + split_length, seen)
    middle = tl.maximum(begin, tl.minimum(end, seen_by_all // TOKENS * TOKENS))

    queries += head * GROUP * query_stride_h
    q = load_rows(queries, rows, last >= 0, query_stride_h, query_stride_t, GROUP, HEAD_DIM, DIM_TILE)
    if WIDE_DOT:
        # The interpreter has no bfloat16 product; on the GPU operands stay narrow and sums are float32.
        q = q.to(tl.float32)
    keys += head * key_stride_h
    scale *= LOG2_E
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in tl.range(begin, middle, TOKENS, num_stages=STAGES):
        k = load_keys(keys, first, end, key_stride_n, HEAD_DIM, DIM_TILE, TOKENS, WIDE_DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = new_top * scale
        weights = tl.exp2(scores * scale - shift[:, None])
        total = total * tl.exp2(top * scale - shift) + tl.sum(weights, axis=1)
        top = new_top
    # Some rows see only a part of these.
    for first in tl.range(middle, end, TOKENS, num_stages=STAGES):
        k = load_keys(keys, first, end, key_stride_n, HEAD_DIM, DIM_TILE, TOKENS, WIDE_DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        is_seen = (first + tl.arange(0, TOKENS))[None, :] <= last[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # None seen so far: -inf - -inf would be NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top * scale)
        weights = tl.exp2(scores * scale - shift[:, None])
        total = total * tl.exp2(top * scale - shift) + tl.sum(weights, axis=1)
        top = new_top

    # A split of which a row sees nothing counts for nothing: its sum is 2 ** -inf.
    is_sum = (last >= 0) & (total > 0.0)
    log_sum = tl.where(is_sum, top * scale + tl.log2(tl.where(is_sum, total, 1.0)), float("-inf"))
    tl.store(partial + (head * num_splits + split) * num_rows + rows, log_sum, mask=rows < num_rows)


@triton.jit(do_not_specialize=[*VARYING[:2], *VARYING[4:], "num_splits"])
def join_log_sums(
    positions, partial, log_sums, reach, position_stride_h, position_stride_t, num_tokens, num_rows, num_splits,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS_TILE: tl.constexpr,
):  # fmt: skip
    """The sums of all splits, infinite where a row sees nothing; and how many tokens some row of this tile sees, and
    how many all do but for padding."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, splits = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, SPLITS_TILE)
    is_read = (splits < num_splits)[:, None] & (rows < num_rows)[None, :]
    source = partial + (head * num_splits + splits[:, None]) * num_rows + rows[None, :]
    found = tl.load(source, mask=is_read, other=float("-inf"))
    top = tl.max(found, axis=0)
    is_sum = top > float("-inf")
    top = tl.where(is_sum, top, 0.0)
    total = tl.sum(tl.exp2(found - top[None, :]), axis=0)
    joined = tl.where(is_sum, top + tl.log2(tl.where(is_sum, total, 1.0)), float("inf"))
    tl.store(log_sums + head * num_rows + rows, joined, mask=rows < num_rows)

    if positions is not None:
        positions += head * GROUP * position_stride_h
    last = last_seen(positions, rows, position_stride_h, position_stride_t, num_tokens, num_rows, GROUP)
    reach += (head * tl.num_programs(0) + tile) * 2
    tl.store(reach, tl.max(last, axis=0) + 1)
    tl.store(reach + 1, tl.min(tl.where(last < 0, num_tokens, last + 1), axis=0))


@triton.jit(do_not_specialize=[*VARYING, "num_tiles"])
def sum_weights(
    queries, keys, positions, shares, log_sums, reach, observed,
    query_stride_h, query_stride_t, key_stride_h, key_stride_n, position_stride_h, position_stride_t,
    share_stride_h, share_stride_t, num_tokens, num_rows, num_tiles, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    REACH_TILE: tl.constexpr, STAGES: tl.constexpr, WIDE_DOT: tl.constexpr,
):  # fmt: skip
    """Sum the weights that a tile of tokens gets from all rows, in the order of the rows."""
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TOKENS
    tokens = first + tl.arange(0, TOKENS)
    begin, middle, end = tiles_that_see(
        reach + head * num_tiles * 2, num_tiles, first, tl.minimum(first + TOKENS, num_tokens), REACH_TILE
    )
    keys += head * key_stride_h
    k = tl.trans(load_keys(keys, first, num_tokens, key_stride_n, HEAD_DIM, DIM_TILE, TOKENS, WIDE_DOT))
    queries += head * GROUP * query_stride_h
    if positions is not None:
        positions += head * GROUP * position_stride_h
    if shares is not None:
        shares += head * GROUP * share_stride_h
    log_sums += head * num_rows
    scale *= LOG2_E
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for tile in tl.range(begin, middle, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        log_sum = tl.load(log_sums + rows, mask=rows < num_rows, other=float("inf"))
        counts = log_sum < float("inf")
        last = last_seen(positions, rows, position_stride_h, position_stride_t, num_tokens, num_rows, GROUP)
        share = share_of(shares, rows, counts, share_stride_h, share_stride_t, GROUP)
        q = load_rows(queries, rows, counts, query_stride_h, query_stride_t, GROUP, HEAD_DIM, DIM_TILE)
        if WIDE_DOT:
            q = q.to(tl.float32)
        scores = tl.dot(q, k, input_precision="tf32x3")
        weights = tl.exp2(scores * scale - log_sum[:, None])
        total += tl.where(tokens[None, :] <= last[:, None], weights, 0.0) * share[:, None]
    for tile in tl.range(middle, end, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        log_sum = tl.load(log_sums + rows, mask=rows < num_rows, other=float("inf"))
        counts = log_sum < float("inf")
        share = share_of(shares, rows, counts, share_stride_h, share_stride_t, GROUP)
        q = load_rows(queries, rows, counts, query_stride_h, query_stride_t, GROUP, HEAD_DIM, DIM_TILE)
        if WIDE_DOT:
            q = q.to(tl.float32)
        scores = tl.dot(q, k, input_precision="tf32x3")
        total += tl.exp2(scores * scale - log_sum[:, None]) * share[:, None]
    tl.store(observed + head * num_tokens + tokens, tl.sum(total, axis=0), mask=tokens < num_tokens)


@triton.jit
def tiles_that_see(reach, num_tiles, first, end_token, REACH_TILE: tl.constexpr):
    """The first tile of rows of which any sees token `first`, from which tile on all that count see all tokens before
    `end_token`, and the end of the tiles of which any sees `first`."""
    begin, middle, end = num_tiles, first * 0, first * 0
    for at in range(0, num_tiles, REACH_TILE):
        index = at + tl.arange(0, REACH_TILE)
        seen = tl.load(reach + index * 2, mask=index < num_tiles, other=0)
        seen_by_all = tl.load(reach + index * 2 + 1, mask=index < num_tiles, other=end_token)
        begin = tl.minimum(begin, tl.min(tl.where(seen > first, index, num_tiles), axis=0))
        end = tl.maximum(end, tl.max(tl.where(seen > first, index + 1, 0), axis=0))
        middle = tl.maximum(middle, tl.max(tl.where(seen_by_all < end_token, index + 1, 0), axis=0))
    return begin, tl.minimum(tl.maximum(middle, begin), tl.maximum(begin, end)), end


@triton.jit
def place_of(rows, stride_h, stride_t, GROUP: tl.constexpr):
    """Where a row of a KV head lies in what has heads and queries."""
    return (rows % GROUP).to(tl.int64) * stride_h + (rows // GROUP).to(tl.int64) * stride_t


@triton.jit
def last_seen(positions, rows, stride_h, stride_t, num_tokens, num_rows, GROUP: tl.constexpr):
    """The last token that each row sees: int32, -1 for padding and beyond the last row."""
    if positions is None:
        last = tl.where(rows < num_rows, num_tokens - num_rows // GROUP + rows // GROUP, -1)
    else:
        last = tl.load(positions + place_of(rows, stride_h, stride_t, GROUP), mask=rows < num_rows, other=-1)
    return tl.maximum(tl.minimum(last, num_tokens - 1), -1).to(tl.int32)


@triton.jit
def share_of(shares, rows, counts, stride_h, stride_t, GROUP: tl.constexpr):
    """The share of each row that counts: float32, 0 of the others."""
    if shares is None:
        share = tl.where(counts, 1.0 / GROUP, 0.0)
    else:
        share = tl.load(shares + place_of(rows, stride_h, stride_t, GROUP), mask=counts, other=0.0)
    return share


@triton.jit
def load_rows(
    queries, rows, is_read, stride_h, stride_t, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr
):  # fmt: skip
    dims = tl.arange(0, DIM_TILE)
    source = queries + place_of(rows, stride_h, stride_t, GROUP)[:, None] + dims[None, :]
    # What is not read may be NaN.
    return tl.load(source, mask=is_read[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_keys(
    keys, first, end, stride, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, TOKENS: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):  # fmt: skip
    tokens, dims = first + tl.arange(0, TOKENS), tl.arange(0, DIM_TILE)
    source = keys + tokens.to(tl.int64)[:, None] * stride + dims[None, :]
    k = tl.load(source, mask=(tokens < end)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if WIDE_DOT:
        k = k.to(tl.float32)
    return k
