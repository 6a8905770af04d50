"""Turned heads against rotations of complex numbers, pair by pair, in double precision."""

from __future__ import annotations

import cmath

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.rope import rope
from gpu_worker.models.config import RopeConfig
from gpu_worker.models.rope import rope_table

THETA, EPS = 100.0, 1e-4


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
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"), [(7, 1, 12, 12), (3, 3, 16, 8), (6, 2, 10, 6)]
)
def test_pairs_rotate_by_position(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, interleaved: bool, has_norms: bool
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    positions = torch.tensor([0, 39, 7, 7])
    qkv = torch.randn(4, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator)
    config = RopeConfig("default", THETA, rotary_dim, interleaved)
    table = rope_table(config, 40, torch.device("cpu"), torch.float32)
    q_norm, k_norm = torch.randn(2, head_dim, generator=generator)
    before = qkv.clone()
    norms = (q_norm, k_norm, EPS) if has_norms else ()
    queries, keys, values = rope(qkv, table, positions, num_heads, num_kv_heads, interleaved, *norms)
    assert torch.equal(qkv, before)
    heads = qkv.view(4, -1, head_dim)
    assert torch.equal(values, heads[:, num_heads + num_kv_heads :])
    first_value = num_heads + num_kv_heads

    def expected(part: Tensor, weight: Tensor) -> Tensor:
        plain = weight.tolist() if has_norms else None
        return torch.tensor(
            [
                [turned_head(head, position, rotary_dim, interleaved, plain) for head in token]
                for token, position in zip(part.tolist(), positions.tolist(), strict=True)
            ]
        )

    torch.testing.assert_close(queries, expected(heads[:, :num_heads], q_norm), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(keys, expected(heads[:, num_heads:first_value], k_norm), atol=2e-5, rtol=2e-5)


def test_16_bit_types_stay_near_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(9, 8 * 32, generator=generator).bfloat16()
    config = RopeConfig("default", THETA, 32)
    table = rope_table(config, 9, torch.device("cpu"), torch.bfloat16)
    got = rope(qkv, table, torch.arange(9), 4, 2)
    expected = rope(qkv.float(), table.float(), torch.arange(9), 4, 2)
    for rounded, exact in zip(got, expected, strict=True):
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded.float(), exact, atol=4e-2, rtol=2**-7)
