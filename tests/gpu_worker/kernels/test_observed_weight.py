"""The kernel of observed weights against its reference, and that against its definition, query by query."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.observed_weight import reference

kernel = pytest.importorskip("gpu_worker.kernels.observed_weight.kernel")

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


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
    observed = kernel.observed_weight(*inputs, scale)
    expected = reference.observed_weight(*inputs, scale)
    torch.testing.assert_close(observed, expected, atol=2e-6, rtol=1e-4)
    return observed


def test_shares_of_softmax_weights_by_hand(device: torch.device) -> None:
    keys = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [9.0, 9.0]]], device=device)
    queries = torch.tensor([[[math.log(3.0) / 0.5, 0.0]], [[5.0, 5.0]]], device=device)
    where = torch.tensor([[1], [0]], device=device), torch.tensor([[0.5], [2.0]], device=device)
    for module in kernel, reference:
        # 1 : 3 over two tokens for the first query head; the second sees one token.
        observed = module.observed_weight(queries, keys, *where, 0.5)
        torch.testing.assert_close(observed, torch.tensor([[0.125 + 2.0, 0.375, 0.0]], device=device))


@pytest.mark.parametrize("max_weights", [1, 200, 1 << 26])
@pytest.mark.parametrize("group", [1, 3])
def test_any_number_of_queries_at_a_time(group: int, max_weights: int) -> None:
    queries, keys, positions, shares = unordered(torch.device("cpu"), group, 9, 21, "none")
    expected = torch.zeros(2, 21, dtype=torch.float64)
    for head in range(2 * group):
        for query, last, share in zip(queries[head], positions[head].tolist(), shares[head], strict=True):
            if last >= 0:
                seen = keys[head // group, : last + 1].double()
                expected[head // group, : last + 1] += share * (seen @ query.double() * 0.3).softmax(dim=0)
    observed = reference.observed_weight(queries, keys, positions, shares, 0.3, max_weights)
    torch.testing.assert_close(observed.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("group", [1, 3, 16])
def test_weights_are_those_of_the_reference(device: torch.device, group: int, num_processors: int) -> None:
    check(problem(device, group, width=11, num_tokens=150))


@pytest.mark.parametrize("width", [1, 11, 37])
def test_the_last_tokens_queries_in_equal_shares_need_not_be_told(
    device: torch.device, width: int, num_processors: int
) -> None:
    for group in (1, 3, 4):
        queries, keys, positions, shares = problem(device, group, width, num_tokens=150)
        equal = torch.full_like(shares, 1 / group)
        for module in kernel, reference:
            told = module.observed_weight(queries, keys, positions, equal, 0.2)
            assert torch.equal(module.observed_weight(queries, keys, None, None, 0.2), told)
            assert torch.equal(module.observed_weight(queries, keys, positions, None, 0.2), told)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(8, torch.float16), (64, torch.bfloat16), (96, torch.bfloat16), (128, torch.float16)],
)
def test_head_sizes_and_rows_of_16_bits(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    check(problem(device, 4, 33, 200, head_dim, dtype))


def test_all_queries_of_a_prompt(device: torch.device) -> None:
    """Every tile of tokens has queries that see none of it, a part, and all of it."""
    inputs = problem(device, 1, 270, 270, 16, torch.bfloat16)
    observed = check(inputs)
    assert torch.equal(kernel.observed_weight(*inputs, 0.2), observed)


@pytest.mark.parametrize(("width", "num_tokens"), [(1, 1), (1, 300), (7, 7)])
def test_few_queries_and_tokens(device: torch.device, width: int, num_tokens: int) -> None:
    for group in (1, 3):
        check(problem(device, group, width, num_tokens))


def unordered(device: torch.device, group: int, width: int, num_tokens: int, order: str) -> Inputs:
    """Heads have queries of their own, some fewer than others: the rest is NaN, and so are their shares."""
    queries, keys, _, _ = problem(device, group, width, num_tokens)
    generator = torch.Generator().manual_seed(2)
    positions = torch.randint(0, num_tokens, (2 * group, width), generator=generator)
    if order != "none":
        positions = positions.sort(dim=1, descending=order == "descending").values
    positions[1, width // 2 :], positions[2 * group // 4], positions[-1, ::3] = -1, -1, -1
    shares = torch.rand(positions.shape, generator=generator).masked_fill(positions < 0, math.nan)
    queries = queries.masked_fill((positions < 0)[..., None].to(device), math.nan)
    return queries, keys, positions.to(device), shares.to(device)


@pytest.mark.parametrize("order", ["ascending", "none", "descending"])
def test_queries_anywhere_and_padding(device: torch.device, order: str, num_processors: int) -> None:
    check(unordered(device, 4, 40, 210, order))


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
    for arguments, message in (
        ((queries.half(), keys, positions, shares), "cast one"),
        ((queries, keys.mT.contiguous().mT, positions, shares), "side by side"),
        ((queries[:3], keys, positions[:3], shares[:3]), "do not fit keys"),
        ((queries, keys, positions.int(), shares), "int64 positions"),
        ((queries, keys, positions[:, 1:], shares), "one for each query"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.observed_weight(*arguments, 1.0)


def test_no_queries_observe_nothing(device: torch.device) -> None:
    queries, keys, positions, shares = problem(device, 2, 5, 9)
    for module in kernel, reference:
        observed = module.observed_weight(queries[:, :0], keys, positions[:, :0], shares[:, :0], 1.0)
        assert torch.equal(observed, torch.zeros(2, 9, device=device))
