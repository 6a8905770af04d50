"""Code assignment as a Triton kernel.

A program codes some tokens of one row (a KV head of a layer) in one part, and all centroids pass by in blocks: each
codebook is read once for every 32 tokens. Few tokens leave a window at once, so rows and parts fill the device.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def pq_assign(keys: Tensor, codebooks: Tensor) -> Tensor:
    """Code of each key: the nearest centroid by L2 in every sub-space; ties take the smallest code.

    keys: [..., T, d]. codebooks: float32 [..., m, ksub, d/m]. Returns uint8 [..., T, m]. All on one CUDA device.
    """
    num_tokens, head_dim = keys.shape[-2:]
    num_parts, ksub, dsub = codebooks.shape[-3:]
    leading = torch.broadcast_shapes(keys.shape[:-2], codebooks.shape[:-3])
    codes = torch.empty(*leading, num_tokens, num_parts, dtype=torch.uint8, device=keys.device)
    if codes.numel() == 0:
        return codes
    keys = keys.expand(*leading, num_tokens, head_dim).contiguous()
    codebooks = codebooks.expand(*leading, num_parts, ksub, dsub).contiguous()
    # A dot needs 16 of everything.
    tokens = max(16, min(32, triton.next_power_of_2(num_tokens)))
    _assign[(leading.numel() * num_parts, triton.cdiv(num_tokens, tokens))](
        keys, codebooks, codes, num_tokens, num_parts, ksub, dsub,
        TOKENS=tokens, BLOCK=max(16, min(64, triton.next_power_of_2(ksub))),
        WIDTH=max(16, triton.next_power_of_2(dsub)), num_warps=4,
    )  # fmt: skip
    return codes


@triton.jit
def _assign(
    keys, codebooks, codes, num_tokens, num_parts, ksub, dsub,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes of TOKENS keys of one row in one part; the codebook passes by in blocks of BLOCK centroids."""
    row, part = (tl.program_id(0) // num_parts).to(tl.int64), tl.program_id(0) % num_parts
    tokens, dims = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    is_token, is_dim = tokens < num_tokens, dims < dsub
    token_places = (row * num_tokens + tokens) * num_parts + part
    vectors = tl.load(
        keys + token_places[:, None] * dsub + dims[None, :],
        mask=is_token[:, None] & is_dim[None, :],
        other=0.0,
    ).to(tl.float32)
    book = codebooks + (row * num_parts + part) * ksub * dsub
    best = tl.full([TOKENS], float("inf"), dtype=tl.float32)
    code = tl.zeros([TOKENS], dtype=tl.int32)
    for first in range(0, ksub, BLOCK):
        rivals = first + tl.arange(0, BLOCK)
        is_rival = rivals < ksub
        centroids = tl.load(
            book + rivals[:, None] * dsub + dims[None, :], mask=is_rival[:, None] & is_dim[None, :], other=0.0
        )
        products = tl.dot(vectors, tl.trans(centroids), input_precision="ieee")
        distances = tl.sum(centroids * centroids, axis=1)[None, :] - 2 * products
        distances = tl.where(is_rival[None, :], distances, float("inf"))
        nearest = tl.min(distances, axis=1)
        smallest = tl.min(tl.where(distances == nearest[:, None], rivals[None, :], ksub), axis=1)
        # Only a nearer one of a later block wins: ties take the smallest code.
        code = tl.where(nearest < best, smallest, code)
        best = tl.minimum(nearest, best)
    tl.store(codes + token_places, code.to(tl.uint8), mask=is_token)
