"""The page score kernel against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_worker.policies.quest.page_bound import reference
from gpu_worker.policies.quest.page_bound.kernel import page_bound


def problem(
    device: torch.device,
    group: int,
    num_pages: int,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    spans: tuple[tuple[int, int], ...] = ((0, 1),),
) -> tuple[Tensor, ...]:
    """Inputs of three KV heads, the pages views into wider storage, seats in no order, one of them nobody's; NaN
    wherever nothing may be read."""
    batch, generator = len(spans), torch.Generator().manual_seed(num_pages)
    query = torch.randn(batch, 3 * group, head_dim, generator=generator).to(dtype)
    pages = torch.randn(batch, 3, num_pages, 4, head_dim, generator=generator).to(dtype)
    seats = torch.arange(batch, 0, -1)
    extremes = torch.full((batch + 1, 3, num_pages + 2, 2, head_dim + 3), float("nan"), dtype=dtype)
    key_min, key_max = extremes[:, :, 1:-1, 0, :head_dim], extremes[:, :, 1:-1, 1, :head_dim]
    for b, (first, last) in enumerate(spans):
        key_min[seats[b], :, first:last] = pages[b, :, first:last].amin(dim=2)
        key_max[seats[b], :, first:last] = pages[b, :, first:last].amax(dim=2)
    begin, end = torch.tensor(spans).T
    extremes = extremes.to(device)
    key_min, key_max = extremes[:, :, 1:-1, 0, :head_dim], extremes[:, :, 1:-1, 1, :head_dim]
    return query.to(device), key_min, key_max, *(tensor.to(device) for tensor in (seats, begin, end))


def check(inputs: tuple[Tensor, ...], num_pages: int) -> None:
    scores = page_bound(*inputs, num_pages)
    assert scores.dtype == torch.float32
    assert scores.is_contiguous()
    torch.testing.assert_close(scores, reference.page_bound(*inputs, num_pages), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("group", [1, 3, 4, 16])
@pytest.mark.parametrize("num_pages", [1, 63, 64, 65, 300])
def test_bounds_are_those_of_the_reference(device: torch.device, group: int, num_pages: int) -> None:
    spans = ((0, num_pages), (num_pages // 3, max(num_pages - 5, num_pages // 3 + 1)))
    check(problem(device, group, num_pages, spans=spans), num_pages)


@pytest.mark.parametrize("head_dim", [8, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_sizes_and_keys_of_16_bits(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    check(problem(device, 4, 70, head_dim, dtype, spans=((7, 66), (0, 70))), 70)


def test_a_sequence_without_candidates_has_no_bounds(device: torch.device) -> None:
    inputs = problem(device, 3, 70, spans=((20, 20), (5, 60), (0, 0)))
    assert torch.isneginf(page_bound(*inputs, 70)[[0, 2]]).all()
    check(inputs, 70)
    check(inputs, 61)


def test_extremes_of_two_layouts(device: torch.device) -> None:
    query, key_min, key_max, *where = problem(device, 4, 90, spans=((4, 80), (0, 90)))
    check((query, key_min.contiguous(), key_max, *where), 90)
    check((query, key_min, key_max.mT.contiguous().mT, *where), 90)
