"""Pieces of attention, joined, against attention over all of their tokens at once."""

from __future__ import annotations

import pytest
import torch
from kernel_rig import amid_nan, assert_rounded

from gpu_worker.kernels.join_pieces import reference

kernel = pytest.importorskip("gpu_worker.kernels.join_pieces.kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim"), [(1, 1, 128), (7, 3, 96), (5, 4, 64), (0, 2, 64)]
)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 700, 5), (64, 1, 2, 9, 30)])
def test_pieces_are_one_attention(
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    sizes: tuple[int, ...],
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    scores = 20 * torch.randn(num_heads, num_tokens, sum(sizes), generator=generator)
    values = torch.randn(num_heads, sum(sizes), head_dim, generator=generator)
    pieces = zip(scores.split(sizes, dim=2), values.split(sizes, dim=1), strict=True)
    outputs = [(own.softmax(dim=2) @ value).transpose(0, 1).to(device, dtype) for own, value in pieces]
    log_sums = torch.stack([own.logsumexp(dim=2) for own in scores.split(sizes, dim=2)]).to(device)
    shares = log_sums.double().softmax(dim=0).transpose(1, 2)[..., None]
    exact = sum(share * output.double() for share, output in zip(shares, outputs, strict=True)).float()
    whole = (scores.softmax(dim=2) @ values).transpose(0, 1).to(device)
    poisoned = [amid_nan(output) if num_tokens else output for output in outputs]
    for joined in reference.join_pieces(log_sums, *outputs), kernel.join_pieces(log_sums, *poisoned):
        assert_rounded(joined, exact, dtype)
        torch.testing.assert_close(
            joined.float(), whole, atol=2e-5 if dtype == torch.float32 else 4e-2, rtol=0
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "group", "head_dim"), [(1, 1, 128), (7, 3, 96), (37, 4, 64)])
@pytest.mark.parametrize("sizes", [(5,), (3, 700, 5)])
def test_pieces_of_a_past_and_what_follows_are_one_attention(
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    group: int,
    head_dim: int,
    sizes: tuple[int, ...],
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    num_keys, num_heads = sum(sizes) + num_tokens, 2 * group
    scores = 20 * torch.randn(num_heads, num_tokens, num_keys, generator=generator)
    later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    scores[..., sum(sizes) :].masked_fill_(later, float("-inf"))
    values = torch.randn(2, num_keys, head_dim, generator=generator).repeat_interleave(group, dim=0)
    *of_past, own_scores = scores.split((*sizes, num_tokens), dim=2)
    *past_values, own_values = values.split((*sizes, num_tokens), dim=1)
    pieces = [own.softmax(dim=2) @ value for own, value in zip(of_past, past_values, strict=True)]
    # A group's queries of a KV head lie one head's behind another's.
    outputs = torch.stack(pieces).unflatten(1, (2, group)).flatten(2, 3).transpose(1, 2).to(device, dtype)
    log_sums = torch.stack([each.logsumexp(dim=2) for each in of_past]).unflatten(1, (2, group)).flatten(2, 3)
    own = (own_scores.softmax(dim=2) @ own_values).transpose(0, 1).to(device, dtype)
    sums = log_sums.to(device), own_scores.logsumexp(dim=2).to(device)
    whole = (scores.softmax(dim=2) @ values).transpose(0, 1).to(device)
    poisoned = amid_nan(outputs), amid_nan(own)
    for joined in (
        reference.join_past(sums[0], outputs, sums[1], own),
        kernel.join_past(sums[0], poisoned[0], sums[1], poisoned[1]),
    ):
        assert joined.shape == own.shape
        assert joined.dtype == dtype
        torch.testing.assert_close(
            joined.float(), whole, atol=2e-5 if dtype == torch.float32 else 4e-2, rtol=0
        )
