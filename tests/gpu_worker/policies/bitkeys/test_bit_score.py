"""Scores by two-bit keys, by kernel and reference, against sums in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from seat_rig import seated, seats_of
from torch import Tensor

from gpu_worker.policies.bitkeys.bit_score import reference

kernel = pytest.importorskip("gpu_worker.policies.bitkeys.bit_score.kernel")

SCALE = 0.02


def problem(
    device: torch.device,
    group: int,
    head_dim: int,
    spans: tuple[tuple[int, int], ...],
    length: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """Inputs of three KV heads of one layer; seats in no order, and NaN or other bytes wherever nothing may be read.

    Queries are whole numbers of which the largest is 127, and the rotation moves and negates them, so that rounding
    changes nothing and every product is exact.
    """
    batch, generator = len(spans), torch.Generator().manual_seed(length)
    query = torch.randint(-20, 21, (batch, 3 * group, head_dim), generator=generator)
    query[..., head_dim // 3] = 127
    order, signs = torch.randperm(head_dim, generator=generator), torch.ones(head_dim)
    signs[::3] = -1
    rotation = (torch.eye(head_dim)[order] * signs).bfloat16()
    codes = torch.randint(0, 256, (batch, 3, length, -(-head_dim // 4)), generator=generator).to(torch.uint8)
    scales = torch.full((batch, 3, length), math.nan, dtype=torch.float16)
    sinks = torch.full((batch, 3, 5, head_dim), math.nan)
    for row, (first, last) in enumerate(spans):
        scales[row, :, first:last] = (torch.rand(3, last - first, generator=generator) / 4).half()
        sinks[row, :, : min(first, 5)] = (
            torch.randint(-2, 3, (3, min(first, 5), head_dim), generator=generator) / 4
        )
    seats = seats_of(batch, device)
    index = (
        seated(codes.to(device), seats, 255),
        seated(scales.to(device), seats, math.nan),
        seated(sinks.to(device), seats, math.nan),
    )
    begin, end = torch.tensor(spans).T
    return query.to(device, dtype), rotation.to(device), *index, seats, begin.to(device), end.to(device)


def check(inputs: tuple[Tensor, ...], num_positions: int) -> None:
    query, rotation, codes, scales, sinks, seats, begin, end = (tensor.cpu() for tensor in inputs)
    group, head_dim = query.shape[1] // 3, query.shape[2]
    expected = torch.full((len(seats), 3, num_positions), -math.inf, dtype=torch.float64)
    for row, (seat, first, last) in enumerate(torch.stack([seats, begin, end], dim=1).tolist()):
        # Every stride-th of them, at most 512.
        stride = max(1, -(-(last - first) // 512))
        sampled = torch.arange(first + stride // 2, last, stride) - first
        for head in range(3 if last > first else 0):
            heads = query[row, head * group : (head + 1) * group].double() * SCALE
            own = codes[seat, head, first:last].long()
            values = torch.cat([(own >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
            values = (values - 4 * (values >= 2))[:, :head_dim].double() + 0.5
            logits = heads @ rotation.double().T @ values.T * scales[seat, head, first:last].double()
            fixed = heads @ sinks[seat, head, :first].double().T
            total = fixed.exp().sum(1) + logits[:, sampled].exp().sum(1) * (last - first) / len(sampled)
            expected[row, head, first:last] = (logits.exp() / total[:, None]).sum(0)
    for module in kernel, reference:
        scores = module.bit_score(*inputs, SCALE, num_positions)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores.double().cpu(), expected, atol=1e-9, rtol=2e-4)


@pytest.mark.parametrize(
    ("group", "head_dim", "length", "dtype"),
    [
        # Nothing is masked where an index is of whole tiles.
        (4, 128, 512, torch.bfloat16),
        (3, 64, 303, torch.bfloat16),
        (16, 80, 303, torch.float16),
        (1, 256, 303, torch.float32),
        (7, 6, 303, torch.float32),
    ],
)
def test_weights_are_summed_over_the_group(
    device: torch.device, group: int, head_dim: int, length: int, dtype: torch.dtype
) -> None:
    check(problem(device, group, head_dim, ((4, 281), (0, 290)), length, dtype), 290)


def test_long_contexts_are_sampled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some tiles a program, and fewer for the last.
    monkeypatch.setattr(kernel, "PROGRAMS", 12)
    check(problem(device, 4, 32, ((3, 2190), (2, 600)), 2200), 2200)


def test_a_sequence_without_candidates_has_no_scores(device: torch.device) -> None:
    inputs = problem(device, 3, 16, ((4, 4), (1, 60), (0, 0)), 70)
    check(inputs, 70)
    check(inputs, 60)
    scores = kernel.bit_score(inputs[0][:0], *inputs[1:5], *(each[:0] for each in inputs[5:]), SCALE, 70)
    assert scores.shape == (0, 3, 70)


def test_queries_of_zeros_weigh_all_alike(device: torch.device) -> None:
    query, *others = problem(device, 2, 64, ((3, 40),), 40)
    for module in kernel, reference:
        scores = module.bit_score(torch.zeros_like(query), *others, SCALE, 40)
        torch.testing.assert_close(scores[..., 3:], torch.full((1, 3, 37), 2 / 40, device=device))
