"""The kernel of observed weights against its reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_worker.kernels.observed_weight import kernel, reference
from gpu_worker.kernels.observed_weight.kernel import observed_weight

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(params=[1, 2, 132])
def num_processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """No splits, two or so of unequal length, a split for each tile."""
    monkeypatch.setattr(kernel, "num_processors", lambda _device: request.param)
    return request.param


def problem(
    device: torch.device,
    group: int,
    width: int,
    num_tokens: int,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """The last queries of a prompt as views among NaN; values, which nobody reads, are NaN too."""
    generator = torch.Generator().manual_seed(group + head_dim + width)
    num_heads = 2 * group
    rows = torch.full((2, num_tokens + 3, 2 * head_dim), math.nan, dtype=dtype)
    rows[:, :num_tokens, :head_dim] = torch.randn(2, num_tokens, head_dim, generator=generator).to(dtype)
    queries = torch.full((width + 1, num_heads, head_dim + 2), math.nan, dtype=dtype)
    queries[:width, :, :head_dim] = torch.randn(width, num_heads, head_dim, generator=generator).to(dtype)
    positions = torch.arange(num_tokens - width, num_tokens).expand(num_heads, -1)
    shares = torch.rand(num_heads, 1, generator=generator)
    keys = rows.to(device)[:, :num_tokens, :head_dim]
    queries = queries.to(device)[:width, :, :head_dim].transpose(0, 1)
    return queries, keys, positions.to(device), shares.to(device).expand(-1, width)


def check(inputs: Inputs, scale: float = 0.2) -> Tensor:
    observed = observed_weight(*inputs, scale)
    expected = reference.observed_weight(*inputs, scale)
    torch.testing.assert_close(observed, expected, atol=2e-6, rtol=1e-4)
    return observed


@pytest.mark.parametrize("group", [1, 3, 16])
def test_weights_are_those_of_the_reference(device: torch.device, group: int, num_processors: int) -> None:
    inputs = problem(device, group, width=11, num_tokens=150)
    observed = check(inputs)
    shares = inputs[3].reshape(2, -1)
    torch.testing.assert_close(observed.sum(dim=1), shares.sum(dim=1))


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(8, torch.bfloat16), (96, torch.float16), (128, torch.bfloat16)]
)
def test_head_sizes_and_rows_of_16_bits(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    check(problem(device, 4, 33, 200, head_dim, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_queries_of_a_prompt(device: torch.device, dtype: torch.dtype) -> None:
    """Every tile of tokens has queries that see none of it, a part, and all of it."""
    inputs = problem(device, 1, 270, 270, 16, dtype)
    observed = check(inputs)
    assert torch.equal(observed_weight(*inputs, 0.2), observed)


@pytest.mark.parametrize(("width", "num_tokens"), [(1, 1), (1, 300), (7, 7)])
def test_few_queries_and_tokens(device: torch.device, width: int, num_tokens: int) -> None:
    for group in (1, 3):
        check(problem(device, group, width, num_tokens))


@pytest.mark.parametrize("order", ["ascending", "none", "descending"])
def test_queries_anywhere_and_padding(device: torch.device, order: str, num_processors: int) -> None:
    """Heads have queries of their own, some fewer than others: the rest is NaN, and so are their shares."""
    queries, keys, _, _ = problem(device, 4, 40, 210)
    generator = torch.Generator().manual_seed(2)
    positions = torch.randint(0, 210, (8, 40), generator=generator)
    if order != "none":
        positions = positions.sort(dim=1, descending=order == "descending").values
    positions[1, 20:], positions[2], positions[5:7, ::3] = -1, -1, -1
    shares = torch.rand(8, 40, generator=generator).masked_fill(positions < 0, math.nan).to(device)
    queries = queries.masked_fill((positions < 0)[..., None].to(device), math.nan)
    check((queries, keys, positions.to(device), shares))


def test_padding_only_observes_nothing(device: torch.device) -> None:
    queries, keys, positions, shares = problem(device, 2, 20, 100)
    positions = positions.clone()
    positions[:2] = -1
    assert not check((queries, keys, positions, shares))[0].any()


def test_a_token_of_much_weight_does_not_hide_the_others(device: torch.device, num_processors: int) -> None:
    """Splits far below the others, whichever come first."""
    queries, keys, positions, shares = problem(device, 4, 8, 300)
    assert torch.isfinite(check((queries * 60, keys, positions, shares), 0.05)).all()


def test_many_tiles_of_queries_are_looked_at_some_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "REACH_TILE", 2)
    monkeypatch.setattr(kernel, "WIDE", replace(kernel.WIDE, met=16))
    check(problem(device, 1, 100, 130))


def test_what_does_not_fit_is_named(device: torch.device) -> None:
    queries, keys, positions, shares = problem(device, 2, 5, 9)
    with pytest.raises(ValueError, match="cast one"):
        observed_weight(queries.half(), keys, positions, shares, 1.0)
    with pytest.raises(ValueError, match="side by side"):
        observed_weight(queries, keys.mT.contiguous().mT, positions, shares, 1.0)
    with pytest.raises(ValueError, match="do not fit keys"):
        observed_weight(queries[:3], keys, positions[:3], shares[:3], 1.0)
    with pytest.raises(ValueError, match="int64 positions"):
        observed_weight(queries, keys, positions.int(), shares, 1.0)
    with pytest.raises(ValueError, match="one for each query"):
        observed_weight(queries, keys, positions[:, 1:], shares, 1.0)


def test_no_queries_observe_nothing(device: torch.device) -> None:
    queries, keys, positions, shares = problem(device, 2, 5, 9)
    observed = observed_weight(queries[:, :0], keys, positions[:, :0], shares[:, :0], 1.0)
    assert torch.equal(observed, torch.zeros(2, 9, device=device))
