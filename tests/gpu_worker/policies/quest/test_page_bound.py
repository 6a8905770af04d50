"""Quest's page score, by kernel and reference, against sums in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_worker.policies.quest.page_bound import reference

kernel = pytest.importorskip("gpu_worker.policies.quest.page_bound.kernel")


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
    """The larger product of every channel and head of a group, summed."""
    query, key_min, key_max, seats, begin, end = (tensor.double().cpu() for tensor in inputs)
    expected = torch.full((len(seats), 3, num_pages), -torch.inf, dtype=torch.float64)
    for b, (seat, first, last) in enumerate(torch.stack([seats, begin, end], dim=1).long().tolist()):
        for head, of_group in enumerate(query[b].chunk(3)):
            least, largest = (
                extreme[seat, head, first : min(last, num_pages)] for extreme in (key_min, key_max)
            )
            products = torch.maximum(of_group[:, None] * least, of_group[:, None] * largest)
            expected[b, head, first:last] = products.sum(dim=(0, 2))
    for module in kernel, reference:
        scores = module.page_bound(*inputs, num_pages)
        assert scores.dtype == torch.float32
        assert scores.is_contiguous()
        torch.testing.assert_close(scores.double().cpu(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("group", "num_pages"), [(1, 1), (3, 63), (4, 64), (7, 65), (16, 300)])
def test_bounds_are_those_of_the_reference(device: torch.device, group: int, num_pages: int) -> None:
    spans = ((0, num_pages), (num_pages // 3, max(num_pages - 5, num_pages // 3 + 1)))
    check(problem(device, group, num_pages, spans=spans), num_pages)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(8, torch.float16), (64, torch.bfloat16), (96, torch.bfloat16), (128, torch.float16)],
)
def test_head_sizes_and_keys_of_16_bits(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    check(problem(device, 4, 70, head_dim, dtype, spans=((7, 66), (0, 70))), 70)


def test_a_sequence_without_candidates_has_no_bounds(device: torch.device) -> None:
    inputs = problem(device, 3, 70, spans=((20, 20), (5, 60), (0, 0)))
    check(inputs, 70)
    check(inputs, 61)


def test_extremes_of_two_layouts(device: torch.device) -> None:
    query, key_min, key_max, *where = problem(device, 4, 90, spans=((4, 80), (0, 90)))
    check((query, key_min.contiguous(), key_max, *where), 90)
    check((query, key_min, key_max.mT.contiguous().mT, *where), 90)
