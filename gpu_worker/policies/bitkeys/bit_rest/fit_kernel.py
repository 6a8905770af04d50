"""The fit of values on keys in Triton, in two launches: keys and values are read once.

`sum_products`, grid (splits, H_kv, parts of the values' coordinates): a program adds up the products of a split's keys,
less the means that are given, with their values, and both by themselves. `join_products`, grid (parts of the keys'
coordinates, H_kv): covariances are the mean products less the products of the means, which are small where keys are
nearly centred. No sum is atomic: two runs agree.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted
from gpu_worker.kernels.attention.programs import dot
from gpu_worker.policies.bitkeys.key_bits.kernel import shares

# Programs in all: the SMs of an H200.
PROGRAMS = 132
# Tokens at a time, of 16 bits and of float32; and of 16 bits where shared memory is small, as on consumer GPUs.
TOKENS, WIDE_TOKENS, FEW_TOKENS = 128, 32, 64
MUCH_SHARED = 200 << 10
# Elements of a program's products.
MOST_PRODUCTS = 128 * 128
# Coordinates of the keys that a program joins.
JOINED = 4
# Splits that it reads at a time.
SPLITS = 8


def fit_values(keys: Tensor, values: Tensor, means: Tensor, value_means: Tensor, slopes: Tensor) -> None:
    """See the reference. All on one CUDA device; keys and values have the same strides, of which the last is 1, and
    what is written is contiguous."""
    num_heads, num_tokens, head_dim = keys.shape
    assert keys.stride() == values.stride(), "keys and values lie in the same rows"
    assert keys.stride(2) == 1, "a row's elements lie side by side"
    assert value_means.is_contiguous(), "means are written in place"
    assert slopes.is_contiguous(), "slopes are written in place"
    is_narrow = keys.dtype != torch.float32
    dims = max(16, triton.next_power_of_2(head_dim))
    value_dims, tokens = min(dims, MOST_PRODUCTS // dims), _tokens(keys)
    size, splits = shares(num_heads, num_tokens, tokens, PROGRAMS)
    products, sums = (
        torch.empty(num_heads, splits, *shape, dims, dtype=torch.float32, device=keys.device)
        for shape in ((dims,), (2,))
    )
    sum_products[(splits, num_heads, dims // value_dims)](
        keys, values, means.contiguous(), products, sums, num_tokens, size, *keys.stride()[:2],
        HEAD_DIM=head_dim, DIMS=dims, VALUE_DIMS=value_dims, TOKENS=tokens, IS_NARROW=is_narrow,
        IS_PLAIN=is_interpreted(), num_warps=8,
    )  # fmt: skip
    join_products[(dims // JOINED, num_heads)](
        products, sums, value_means, slopes, num_tokens, splits,
        HEAD_DIM=head_dim, DIMS=dims, JOINED=JOINED, SPLITS=SPLITS, num_warps=4,
    )  # fmt: skip


def _tokens(keys: Tensor) -> int:
    """Tokens at a time."""
    if keys.dtype == torch.float32:
        return WIDE_TOKENS
    return TOKENS if not keys.is_cuda or _has_much_shared(keys.device) else FEW_TOKENS


@cache
def _has_much_shared(device: torch.device) -> bool:
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= MUCH_SHARED


@triton.jit(do_not_specialize=["num_tokens", "size"])
def sum_products(
    keys, values, means, products, sums, num_tokens, size, stride_head, stride_token,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr, TOKENS: tl.constexpr,
    IS_NARROW: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    split, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    dims, value_dims = tl.arange(0, DIMS), part * VALUE_DIMS + tl.arange(0, VALUE_DIMS)
    mean = tl.load(means + head * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
    keys += head * stride_head
    values += head * stride_head
    of_products = tl.zeros([DIMS, VALUE_DIMS], tl.float32)
    of_keys, of_values = tl.zeros([DIMS], tl.float32), tl.zeros([VALUE_DIMS], tl.float32)
    for start in range(split * size, tl.minimum((split + 1) * size, num_tokens), TOKENS):
        token = start + tl.arange(0, TOKENS)
        is_token, row = (token < num_tokens)[:, None], token.to(tl.int64)[:, None] * stride_token
        inside = is_token & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + row + dims[None, :], mask=inside, other=0.0).to(tl.float32) - mean[None, :]
        key = tl.where(is_token, key, 0.0)
        value = tl.load(
            values + row + value_dims[None, :], mask=is_token & (value_dims < HEAD_DIM)[None, :], other=0.0
        ).to(tl.float32)  # fmt: skip
        of_values += tl.sum(value, axis=0)
        if IS_NARROW:
            # Values are as they were then.
            key, value = key.to(keys.dtype.element_ty), value.to(values.dtype.element_ty)
        of_keys += tl.sum(key.to(tl.float32), axis=0)
        of_products += dot(tl.trans(key), value, IS_PLAIN)
    own = head * tl.num_programs(0) + split
    tl.store(products + own * DIMS * DIMS + dims[:, None] * DIMS + value_dims[None, :], of_products)
    tl.store(sums + (2 * own + 1) * DIMS + value_dims, of_values)
    if part == 0:
        tl.store(sums + 2 * own * DIMS + dims, of_keys)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def join_products(
    products, sums, value_means, slopes, num_tokens, splits,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, JOINED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    some, dims = tl.program_id(0) * JOINED + tl.arange(0, JOINED), tl.arange(0, DIMS)
    total = tl.zeros([JOINED, DIMS], tl.float32)
    of_keys, of_values = tl.zeros([JOINED], tl.float32), tl.zeros([DIMS], tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        own, is_split = head * splits + split, split < splits
        places = own[:, None, None] * DIMS * DIMS + some[None, :, None] * DIMS + dims[None, None, :]
        total += tl.sum(tl.load(products + places, mask=is_split[:, None, None], other=0.0), axis=0)
        places = 2 * own[:, None] * DIMS
        of_keys += tl.sum(tl.load(sums + places + some[None, :], mask=is_split[:, None], other=0.0), axis=0)
        places += DIMS
        of_values += tl.sum(tl.load(sums + places + dims[None, :], mask=is_split[:, None], other=0.0), axis=0)
    number = num_tokens.to(tl.float32)
    of_keys, of_values = of_keys / number, of_values / number
    covariances = total / number - of_keys[:, None] * of_values[None, :]
    is_dim = dims < HEAD_DIM
    target = slopes + (head * HEAD_DIM + some[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(
        target, covariances.to(slopes.dtype.element_ty), mask=(some < HEAD_DIM)[:, None] & is_dim[None, :]
    )
    if tl.program_id(0) == 0:
        tl.store(value_means + head * HEAD_DIM + dims, of_values, mask=is_dim)
