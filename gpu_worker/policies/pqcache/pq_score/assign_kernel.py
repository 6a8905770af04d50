"""Code assignment as a Triton kernel.

A program codes some tokens of one head (a KV head of a layer) in one part, and all centroids pass by in blocks. Keys of
16 bits are multiplied on tensor cores as they are, and each centroid as the sum of three numbers of their type: as
exact as float32 for bfloat16, and to 3e-8 of a coordinate for float16. Keys of float32 go without tensor cores.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted

# Tokens of a program, at most: of 16-bit keys and of float32 keys.
NARROW_TOKENS = 128
WIDE_TOKENS = 32
MOST_RIVALS = 64


def pq_assign(keys: Tensor, codebooks: Tensor) -> Tensor:
    """Code of each key: the nearest centroid by L2 in every sub-space; ties take the smallest code.

    keys: [..., T, d], contiguous in d only. codebooks: float32 [..., m, ksub, d/m]. Returns uint8 [..., T, m]. All on
    one CUDA device.
    """
    num_tokens, head_dim = keys.shape[-2:]
    num_parts, ksub, dsub = codebooks.shape[-3:]
    leading = torch.broadcast_shapes(keys.shape[:-2], codebooks.shape[:-3])
    codes = torch.empty(*leading, num_tokens, num_parts, dtype=torch.uint8, device=keys.device)
    if codes.numel() == 0:
        return codes
    # A view where the leading dimensions lie evenly, as those of one layer do.
    keys = keys.expand(*leading, num_tokens, head_dim).reshape(-1, num_tokens, head_dim)
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    codebooks = codebooks.expand(*leading, num_parts, ksub, dsub).contiguous()
    is_narrow = keys.dtype != torch.float32
    # A dot needs 16 of everything.
    tokens = max(16, min(NARROW_TOKENS if is_narrow else WIDE_TOKENS, triton.next_power_of_2(num_tokens)))
    _assign[(triton.cdiv(num_tokens, tokens), leading.numel() * num_parts)](
        keys, codebooks, codes, *keys.stride()[:2], num_tokens, num_parts, ksub, dsub,
        TOKENS=tokens, BLOCK=max(16, min(MOST_RIVALS, triton.next_power_of_2(ksub))),
        WIDTH=max(16, triton.next_power_of_2(dsub)), IS_NARROW=is_narrow, WIDE_DOT=is_interpreted(), num_warps=4,
    )  # fmt: skip
    return codes


@triton.jit(do_not_specialize=["num_tokens"])
def _assign(
    keys, codebooks, codes, stride_row, stride_token, num_tokens, num_parts, ksub, dsub,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, IS_NARROW: tl.constexpr, WIDE_DOT: tl.constexpr,
):  # fmt: skip
    """Codes of TOKENS keys of one head in one part; the codebook passes by in blocks of BLOCK centroids."""
    row, part = (tl.program_id(1) // num_parts).to(tl.int64), tl.program_id(1) % num_parts
    tokens, dims = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    is_token, is_dim = tokens < num_tokens, dims < dsub
    source = (
        keys + row * stride_row + tokens.to(tl.int64)[:, None] * stride_token + part * dsub + dims[None, :]
    )
    vectors = tl.load(source, mask=is_token[:, None] & is_dim[None, :], other=0.0)
    book = codebooks + (row * num_parts + part) * ksub * dsub
    best = tl.full([TOKENS], float("inf"), dtype=tl.float32)
    code = tl.zeros([TOKENS], dtype=tl.int32)
    for first in range(0, ksub, BLOCK):
        rivals = first + tl.arange(0, BLOCK)
        is_rival = rivals < ksub
        centroids = tl.load(
            book + rivals[:, None] * dsub + dims[None, :], mask=is_rival[:, None] & is_dim[None, :], other=0.0
        )
        if IS_NARROW:
            products = _product_of_parts(vectors, centroids, WIDE_DOT)
        else:
            products = tl.dot(vectors, tl.trans(centroids), input_precision="ieee")
        distances = tl.sum(centroids * centroids, axis=1)[None, :] - 2 * products
        distances = tl.where(is_rival[None, :], distances, float("inf"))
        nearest = tl.min(distances, axis=1)
        smallest = tl.min(tl.where(distances == nearest[:, None], rivals[None, :], ksub), axis=1)
        # Only a nearer one of a later block wins: ties take the smallest code.
        code = tl.where(nearest < best, smallest, code)
        best = tl.minimum(nearest, best)
    target = codes + (row * num_tokens + tokens) * num_parts + part
    tl.store(target, code.to(tl.uint8), mask=is_token)


@triton.jit
def _product_of_parts(vectors, centroids, WIDE_DOT: tl.constexpr):
    """Vectors of 16 bits by float32 centroids, these as a sum of three of the vectors' type, the least first."""
    high = centroids.to(vectors.dtype)
    rest = centroids - high.to(tl.float32)
    middle = rest.to(vectors.dtype)
    low = (rest - middle.to(tl.float32)).to(vectors.dtype)
    if WIDE_DOT:
        # The interpreter has no bfloat16 product.
        vectors, high = vectors.to(tl.float32), high.to(tl.float32)
        middle, low = middle.to(tl.float32), low.to(tl.float32)
    products = tl.dot(vectors, tl.trans(low))
    products = tl.dot(vectors, tl.trans(middle), products)
    return tl.dot(vectors, tl.trans(high), products)
