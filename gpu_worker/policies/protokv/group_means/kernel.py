"""Means of groups in Triton: votes are added up by group, then every token takes its group's mean.

Additions are atomic and of integers, so that their order does not matter, and the result is the reference's to the bit.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.policies.protokv.group_means import reference

ONE = tl.constexpr(2.0**reference.VOTE_BITS)
STEP = tl.constexpr(2.0**-reference.VOTE_BITS)
TILE = 1024


def group_means(votes: Tensor, labels: Tensor, num_groups: int) -> Tensor:
    """See the reference. All on one CUDA device; the last strides are 1."""
    num_heads, num_tokens = votes.shape
    means = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=votes.device)
    if means.numel():
        # Of each group, the sum of its votes and their number.
        totals = torch.zeros(num_heads, num_groups, 2, dtype=torch.int64, device=votes.device)
        grid = (triton.cdiv(num_tokens, TILE), num_heads)
        shape = (votes.stride(0), labels.stride(0), num_tokens, num_groups)
        add_votes[grid](votes, labels, totals, *shape, TILE=TILE, num_warps=4)
        spread_means[grid](labels, totals, means, *shape[1:], TILE=TILE, num_warps=4)
    return means


@triton.jit(do_not_specialize=["num_tokens", "num_groups"])
def add_votes(votes, labels, totals, votes_stride, labels_stride, num_tokens, num_groups, TILE: tl.constexpr):
    """Some tokens of one head."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_token = token < num_tokens
    label = tl.load(labels + head * labels_stride + token, mask=is_token, other=0)
    vote = tl.load(votes + head * votes_stride + token, mask=is_token, other=0.0)
    total = totals + (head * num_groups + label) * 2
    tl.atomic_add(total, (vote * ONE).to(tl.int64), mask=is_token, sem="relaxed")
    tl.atomic_add(total + 1, tl.full([TILE], 1, tl.int64), mask=is_token, sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens", "num_groups"])
def spread_means(labels, totals, means, labels_stride, num_tokens, num_groups, TILE: tl.constexpr):
    """Some tokens of one head."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_token = token < num_tokens
    label = tl.load(labels + head * labels_stride + token, mask=is_token, other=0)
    total = totals + (head * num_groups + label) * 2
    sums = tl.load(total, mask=is_token, other=0).to(tl.float32)
    counts = tl.load(total + 1, mask=is_token, other=1).to(tl.float32)
    tl.store(means + head * num_tokens + token, tl.div_rn(sums, counts) * STEP, mask=is_token)
