"""Turned heads against the reference; whatever no call may read, and fresh memory, is NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.rope import reference, rope

kernel = pytest.importorskip("gpu_worker.kernels.rope.kernel")

# Of one rounding; the interpreter cuts bf16 off where the GPU rounds.
TOLERANCES = {
    torch.float32: {"atol": 2e-6, "rtol": 2e-6},
    torch.float16: {"atol": 1e-6, "rtol": 2**-10},
    torch.bfloat16: {"atol": 1e-6, "rtol": 2**-7},
}
NUM_POSITIONS = 60


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool


SHAPES = {
    "llama": Shape(32, 8, 128, 128, False),
    "group1-96": Shape(3, 3, 96, 96, False),
    "group7": Shape(14, 2, 64, 64, False),
    "group16-half": Shape(16, 1, 128, 64, False),
    "odd-20": Shape(4, 1, 20, 20, False),
    "interleaved": Shape(6, 2, 64, 64, True),
    "interleaved-32-of-64": Shape(14, 2, 64, 32, True),
    "interleaved-96": Shape(3, 1, 96, 48, True),
    "interleaved-6-of-12": Shape(4, 1, 12, 6, True),
}


def problem(
    shape: Shape, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv with NaN beside each row, a table of NaN where no position is, positions from a wider table."""
    generator = torch.Generator().manual_seed(num_tokens)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    wide = torch.full((num_tokens, width + 8), math.nan)
    wide[:, :width] = 3 * torch.randn(num_tokens, width, generator=generator)
    inputs = torch.full((num_tokens, 3), -1)
    inputs[:, 1] = torch.randint(0, NUM_POSITIONS, (num_tokens,), generator=generator)
    inputs[0, 1] = NUM_POSITIONS - 1
    positions = inputs.to(device)[:, 1]
    table = torch.full((NUM_POSITIONS, 2, shape.rotary_dim), math.nan)
    seen = inputs[:, 1]
    table[seen] = torch.randn(NUM_POSITIONS, 2, shape.rotary_dim, generator=generator)[seen]
    return wide.to(device, dtype)[:, :width], table.to(device, dtype), positions


def norms_of(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q_norm, k_norm = 1 + 0.3 * torch.randn(2, shape.head_dim, generator=generator)
    return q_norm.to(device, dtype), k_norm.to(device, dtype)


def check(shape: Shape, num_tokens: int, has_norms: bool, dtype: torch.dtype, device: torch.device) -> None:
    qkv, table, positions = problem(shape, num_tokens, dtype, device)
    norms = norms_of(shape, dtype, device) if has_norms else (None, None)
    before = qkv.clone()
    heads = (shape.num_heads, shape.num_kv_heads, shape.interleaved)
    queries, keys, values = kernel.rope(qkv, table, positions, *heads, *norms, 1e-5)
    wide_norms = [None if norm is None else norm.float() for norm in norms]
    expected = reference.rope(qkv.float(), table.float(), positions, *heads, *wide_norms, 1e-5)
    assert torch.equal(qkv, before)
    assert queries.is_contiguous()
    assert keys.is_contiguous()
    assert values.data_ptr() == qkv[:, (shape.num_heads + shape.num_kv_heads) * shape.head_dim :].data_ptr()
    assert torch.equal(values, expected[2].to(dtype))
    for turned, wide in zip((queries, keys), expected[:2], strict=True):
        assert (turned.dtype, turned.shape) == (dtype, wide.shape)
        torch.testing.assert_close(turned.float(), wide, **TOLERANCES[dtype])


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference(name: str, has_norms: bool, num_tokens: int, device: torch.device) -> None:
    check(SHAPES[name], num_tokens, has_norms, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["group7", "group1-96", "interleaved-32-of-64"])
def test_other_types(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(SHAPES[name], 33, True, dtype, device)


@pytest.mark.parametrize("interleaved", [False, True])
def test_no_tokens(interleaved: bool, device: torch.device) -> None:
    qkv, table = torch.empty(0, 6 * 64, device=device), torch.zeros(4, 2, 64, device=device)
    positions = torch.zeros(0, dtype=torch.int64, device=device)
    for function in kernel.rope, rope:
        queries, keys, values = function(qkv, table, positions, 4, 1, interleaved)
        assert queries.shape == (0, 4, 64)
        assert keys.shape == values.shape == (0, 1, 64)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_type_is_rounded_to_once(interleaved: bool, device: torch.device) -> None:
    # 1.5 * (1 + 2^-8) - 1.5 is lost if the product is rounded to bf16 before the sum.
    qkv = torch.tensor([[1.5, 1.5, 0, 0, 0, 0]], dtype=torch.bfloat16, device=device)
    table = torch.tensor([[[1 + 2**-7, 1.0], [-1.0, 1.0]]], dtype=torch.bfloat16, device=device)
    positions = torch.zeros(1, dtype=torch.int64, device=device)
    queries, _, _ = kernel.rope(qkv, table, positions, 1, 1, interleaved)
    assert queries.flatten().tolist() == [1.5 * 2**-7, 3.0]
