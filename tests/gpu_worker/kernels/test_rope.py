"""Turned heads: rotations of complex numbers, pair by pair, and where keys and values go. All else is in the table."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from kernel_contract import on_device, same
from operations.activations import HEADS, projected

from gpu_worker.kernels.rope import reference
from gpu_worker.layers.rope import RopeSpec, rope_table

kernel = pytest.importorskip("gpu_worker.kernels.rope.kernel")

THETA, EPS = 100.0, 1e-4


@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_keys_and_values_go_to_the_rows_that_are_asked_for(
    heads: tuple[tuple[int, int, int, int], bool], has_norms: bool, device: torch.device
) -> None:
    arguments = on_device(projected(*heads, has_norms), device)
    (_, num_kv_heads, d, _), _ = heads
    # What is not a number in a value stays there.
    arguments["qkv"][0, -1] = math.inf
    for module in kernel, reference:
        expected = module.rope(**arguments)
        rows = torch.full((num_kv_heads, 16, 2 * d), math.nan, dtype=torch.bfloat16, device=device)
        found = module.rope(**arguments, rows=rows[:, 3:8])
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        both = torch.cat(expected[1:], dim=-1).transpose(0, 1)
        assert same(rows, torch.nn.functional.pad(both, (0, 0, 3, 8), value=math.nan))
        # Without rows values are read where they are.
        values = arguments["qkv"][:, -num_kv_heads * d :]
        assert expected[2].data_ptr() == values.data_ptr()


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
