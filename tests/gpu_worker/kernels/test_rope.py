"""Turned heads: the kernel against the reference, and that against rotations of complex numbers, pair by pair.

Whatever no call may read, and fresh memory, is NaN.
"""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass

import pytest
import torch
from kernel_rig import amid_nan, assert_rounded
from torch import Tensor

from gpu_worker.kernels.rope import reference
from gpu_worker.layers.rope import RopeSpec, rope_table

kernel = pytest.importorskip("gpu_worker.kernels.rope.kernel")

NUM_POSITIONS = 60
THETA, EPS = 100.0, 1e-4


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
    # as layers without RoPE are computed
    "pair-of-64": Shape(8, 2, 64, 2, False),
    "interleaved": Shape(6, 2, 64, 64, True),
    "interleaved-32-of-64": Shape(14, 2, 64, 32, True),
    "interleaved-96": Shape(3, 1, 96, 48, True),
    "interleaved-6-of-12": Shape(4, 1, 12, 6, True),
}


def problem(
    shape: Shape, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv amid NaN, a table of NaN where no position is, positions from a wider table."""
    generator = torch.Generator().manual_seed(num_tokens)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = 3 * torch.randn(num_tokens, width, generator=generator)
    inputs = torch.full((num_tokens, 3), -1)
    inputs[:, 1] = torch.randint(0, NUM_POSITIONS, (num_tokens,), generator=generator)
    inputs[0, 1] = NUM_POSITIONS - 1
    positions = inputs.to(device)[:, 1]
    table = torch.full((NUM_POSITIONS, 2, shape.rotary_dim), math.nan)
    seen = inputs[:, 1]
    table[seen] = torch.randn(NUM_POSITIONS, 2, shape.rotary_dim, generator=generator)[seen]
    return amid_nan(qkv.to(device, dtype), 8), table.to(device, dtype), positions


def check(shape: Shape, num_tokens: int, has_norms: bool, dtype: torch.dtype, device: torch.device) -> None:
    qkv, table, positions = problem(shape, num_tokens, dtype, device)
    before = qkv.clone()
    heads = (shape.num_heads, shape.num_kv_heads, shape.interleaved)
    weights = 1 + 0.3 * torch.randn(2, shape.head_dim, generator=torch.Generator().manual_seed(1))
    norms = (*weights.to(device, dtype), EPS) if has_norms else ()
    queries, keys, values = kernel.rope(qkv, table, positions, *heads, *norms)
    wide_norms = (*weights.to(device, dtype).float(), EPS) if has_norms else ()
    expected = reference.rope(qkv.float(), table.float(), positions, *heads, *wide_norms)
    assert torch.equal(qkv, before)
    assert queries.is_contiguous()
    assert keys.is_contiguous()
    assert values.data_ptr() == qkv[:, (shape.num_heads + shape.num_kv_heads) * shape.head_dim :].data_ptr()
    assert torch.equal(values, expected[2].to(dtype))
    for turned, exact in zip((queries, keys), expected[:2], strict=True):
        assert_rounded(turned, exact, dtype)
    # The reference rounds each operation.
    near = {"atol": 40 * torch.finfo(dtype).eps, "rtol": 4 * torch.finfo(dtype).eps}
    for turned, exact in zip(reference.rope(qkv, table, positions, *heads, *norms), expected, strict=True):
        assert turned.dtype == dtype
        torch.testing.assert_close(turned.float(), exact, **near)


@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference(name: str, has_norms: bool, device: torch.device) -> None:
    check(SHAPES[name], 5, has_norms, torch.bfloat16, device)


@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_keys_and_values_go_to_the_rows_that_are_asked_for(
    name: str, has_norms: bool, device: torch.device
) -> None:
    shape, num_tokens, dtype = SHAPES[name], 5, torch.bfloat16
    qkv, table, positions = problem(shape, num_tokens, dtype, device)
    # What is no number in a value stays there.
    qkv[0, -1] = math.inf
    heads, d = (shape.num_heads, shape.num_kv_heads, shape.interleaved), shape.head_dim
    norms = (*(1 + torch.rand(2, d, device=device)).to(dtype), EPS) if has_norms else (None, None, 0.0)
    buffer = torch.full((shape.num_kv_heads, 16, 2 * d), math.nan, dtype=dtype, device=device)
    for module in kernel, reference:
        expected = module.rope(qkv, table, positions, *heads, *norms)
        rows = buffer.clone()
        found = module.rope(qkv, table, positions, *heads, *norms, rows[:, 3 : 3 + num_tokens])
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(rows[:, 3:8, :d], expected[1].transpose(0, 1))
        assert torch.equal(rows[:, 3:8, d:], expected[2].transpose(0, 1))
        assert rows[:, :3].isnan().all()
        assert rows[:, 8:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("name", "num_tokens"), [("group7", 33), ("group1-96", 1), ("interleaved-32-of-64", 1)]
)
def test_other_types(name: str, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    check(SHAPES[name], num_tokens, True, dtype, device)


@pytest.mark.parametrize("interleaved", [False, True])
def test_no_tokens(interleaved: bool, device: torch.device) -> None:
    qkv, table = torch.empty(0, 6 * 64, device=device), torch.zeros(4, 2, 64, device=device)
    positions = torch.zeros(0, dtype=torch.int64, device=device)
    for module in kernel, reference:
        queries, keys, values = module.rope(qkv, table, positions, 4, 1, interleaved)
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


def turned_head(
    head: list[float], position: int, rotary_dim: int, interleaved: bool, weight: list[float] | None
) -> list[float]:
    if weight is not None:
        root = (sum(x * x for x in head) / len(head) + EPS) ** 0.5
        head = [x / root * w for x, w in zip(head, weight, strict=True)]
    out = list(head)
    for pair in range(rotary_dim // 2):
        left, right = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary_dim // 2)
        turn = cmath.rect(1.0, position * THETA ** (-2 * pair / rotary_dim))
        number = complex(head[left], head[right]) * turn
        out[left], out[right] = number.real, number.imag
    return out


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"), [(3, 3, 12, 12), (6, 2, 10, 6)]
)
def test_pairs_rotate_by_position(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, interleaved: bool, has_norms: bool
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    positions = [0, 39, 7, 7]
    heads = torch.randn(4, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    config = RopeSpec("default", THETA, rotary_dim, interleaved)
    table = rope_table(config, 40, torch.device("cpu"), torch.float32)
    weights = torch.randn(2, head_dim, generator=generator)
    norms = (*weights, EPS) if has_norms else ()
    *turned, values = reference.rope(
        heads.flatten(1), table, torch.tensor(positions), num_heads, num_kv_heads, interleaved, *norms
    )
    *parts, expected_values = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    assert torch.equal(values, expected_values)
    for found, part, weight in zip(turned, parts, weights.tolist(), strict=True):
        expected = [
            [
                turned_head(head, position, rotary_dim, interleaved, weight if has_norms else None)
                for head in token
            ]
            for token, position in zip(part.tolist(), positions, strict=True)
        ]
        torch.testing.assert_close(found, torch.tensor(expected), atol=2e-5, rtol=2e-5)
