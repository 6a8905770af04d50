"""Quest's page score as a Triton kernel.

max(q * least, q * largest) is q * largest for a positive q and q * least for a negative one, so the whole group needs
two vectors, the sums of its positive and of its negative parts, and a page costs one dot of length 2d whatever the
group. A program takes TILES tiles of pages of one head (of a lane), the next ones loaded while one is
summed; what counts is reading both extremes of every candidate page once.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_PAGES = 32
TILES = 4


def page_bound(
    query: Tensor,
    key_min: Tensor,
    key_max: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    num_pages: int,
) -> Tensor:
    """See the reference. All on one CUDA device; views of extremes whose last stride is 1 are read in place."""
    _, num_kv_heads, _, head_dim = key_min.shape
    batch = query.shape[0]
    scores = torch.empty(batch, num_kv_heads, num_pages, dtype=torch.float32, device=query.device)
    if scores.numel() == 0:
        return scores
    query, seats, begin, end = (tensor.contiguous() for tensor in (query, seats, begin, end))
    if key_min.stride(-1) != 1 or key_max.stride(-1) != 1:
        key_min, key_max = key_min.contiguous(), key_max.contiguous()
    group = query.shape[1] // num_kv_heads
    spans = triton.cdiv(num_pages, BLOCK_PAGES * TILES)
    _page_bound[(batch * num_kv_heads * spans,)](
        query, key_min, key_max, seats, begin, end, scores, num_kv_heads, num_pages, head_dim, group, spans,
        *key_min.stride()[:3], *key_max.stride()[:3],
        WIDTH=triton.next_power_of_2(head_dim), GROUP_WIDTH=triton.next_power_of_2(group),
        BLOCK=BLOCK_PAGES, TILES=TILES, num_warps=4,
    )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=["spans"], do_not_specialize_on_alignment=["seats", "begin", "end"])
def _page_bound(
    query, key_min, key_max, seats, begin, end, scores, num_kv_heads, num_pages, head_dim, group, spans,
    min_stride_seat, min_stride_head, min_stride_page, max_stride_seat, max_stride_head, max_stride_page,
    WIDTH: tl.constexpr, GROUP_WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Bounds of BLOCK * TILES pages of one head; -inf where no candidate is."""
    row, span = (tl.program_id(0) // spans).to(tl.int64), tl.program_id(0) % spans
    sequence, kv_head = row // num_kv_heads, row % num_kv_heads
    first, last = tl.load(begin + sequence), tl.load(end + sequence)
    dims, heads = tl.arange(0, WIDTH), tl.arange(0, GROUP_WIDTH)
    is_dim = dims < head_dim
    vectors = tl.load(
        query + (row * group + heads[:, None]) * head_dim + dims[None, :],
        mask=(heads < group)[:, None] & is_dim[None, :],
        other=0.0,
    ).to(tl.float32)
    positive = tl.sum(tl.maximum(vectors, 0.0), axis=0)
    negative = tl.sum(tl.minimum(vectors, 0.0), axis=0)
    seat = tl.load(seats + sequence)
    key_min += seat * min_stride_seat + kv_head * min_stride_head
    key_max += seat * max_stride_seat + kv_head * max_stride_head
    for tile in tl.range(TILES):
        pages = (span * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        is_candidate = (pages >= first) & (pages < last) & (pages < num_pages)
        is_used = is_candidate[:, None] & is_dim[None, :]
        wide = pages[:, None].to(tl.int64)
        least = tl.load(key_min + wide * min_stride_page + dims[None, :], mask=is_used, other=0.0)
        largest = tl.load(key_max + wide * max_stride_page + dims[None, :], mask=is_used, other=0.0)
        products = least.to(tl.float32) * negative[None, :] + largest.to(tl.float32) * positive[None, :]
        bounds = tl.where(is_candidate, tl.sum(products, axis=1), float("-inf"))
        tl.store(scores + row * num_pages + pages, bounds, mask=pages < num_pages)
