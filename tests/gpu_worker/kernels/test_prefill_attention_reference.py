"""Chunked causal attention against a loop over tokens, and the fused form against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.prefill_attention import attend_chunk, attend_chunk_naive


def problem(
    num_tokens: int, begin: int, group: int, head_dim: int, dtype: torch.dtype, num_kv_heads: int = 2
) -> tuple[Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(num_tokens + begin)
    query = 2 * torch.randn(num_tokens, num_kv_heads * group, head_dim, generator=generator)
    # Rows beyond the chunk are not written yet: they hold anything.
    rows = torch.full((num_kv_heads, begin + num_tokens + 5, 2 * head_dim), float("nan"))
    rows[:, : begin + num_tokens] = torch.randn(
        num_kv_heads, begin + num_tokens, 2 * head_dim, generator=generator
    )
    return query.to(dtype), rows.to(dtype), head_dim**-0.5


def causal_loop(query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    group = num_heads // rows.shape[0]
    output = torch.zeros(query.shape, dtype=torch.float64)
    for token in range(num_tokens):
        for head in range(num_heads):
            past = rows[head // group, : begin + token + 1].double()
            weights = (past[:, :head_dim] @ query[token, head].double() * scale).softmax(0)
            output[token, head] = weights @ past[:, head_dim:]
    return output


@pytest.mark.parametrize("attend", [attend_chunk_naive, attend_chunk])
@pytest.mark.parametrize(("num_tokens", "begin"), [(1, 0), (1, 1), (1, 129), (63, 0), (17, 1), (20, 129)])
def test_every_token_attends_itself_and_what_came_before(attend, num_tokens: int, begin: int) -> None:
    query, rows, scale = problem(num_tokens, begin, group=3, head_dim=16, dtype=torch.float32)
    torch.testing.assert_close(
        attend(query, rows, begin, scale).double(),
        causal_loop(query, rows, begin, scale),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 96), (4, 128), (7, 64), (8, 128)])
@pytest.mark.parametrize("begin", [0, 1, 129])
@pytest.mark.parametrize("num_tokens", [1, 63, 300])
def test_the_fused_form_equals_the_definition(
    num_tokens: int, begin: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    query, rows, scale = problem(num_tokens, begin, group, head_dim, dtype)
    output = attend_chunk(query, rows, begin, scale)
    assert output.dtype == dtype
    assert output.shape == query.shape
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    expected = attend_chunk_naive(query.float(), rows.float(), begin, scale)
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)


def test_the_fused_form_takes_views_of_a_wider_buffer() -> None:
    query, rows, scale = problem(40, 24, 3, 64, torch.float32)
    wide = torch.randn(40, 6 + 4, 64)
    wide[:, :6] = query
    expected = attend_chunk_naive(query, rows, 24, scale)
    torch.testing.assert_close(attend_chunk(wide[:, :6], rows, 24, scale), expected, atol=1e-5, rtol=1e-5)
