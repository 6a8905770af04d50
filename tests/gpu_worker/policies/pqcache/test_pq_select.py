"""Selection by pairs of codes: the kernel against its reference, and that against sorting candidates one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from seat_rig import seated, seats_of
from torch import Tensor

from gpu_worker.policies.pqcache.pq_score.reference import pq_score
from gpu_worker.policies.pqcache.pq_select import reference

kernel = pytest.importorskip("gpu_worker.policies.pqcache.pq_select.kernel")

Spans = tuple[tuple[int, int], ...]


def problem(
    device: torch.device,
    spans: Spans,
    asked: tuple[int, ...],
    num_positions: int,
    group: int = 4,
    book: tuple[int, int] = (64, 32),
    dtype: torch.dtype = torch.float32,
    is_exact: bool = False,
    scale: float = 0.3,
) -> list[Any]:
    """Arguments of two KV heads in one layer of an index. book: ksub, d/2.

    Outside the candidates lies any byte, in other seats NaN. is_exact: scores are multiples of 1/4 in base 2, so that
    no rounding can change an order, and ties of different pairs abound.
    """
    ksub, dsub = book
    batch, generator = len(spans), torch.Generator().manual_seed(num_positions)
    query = torch.randn(batch, 2 * group, 2 * dsub, generator=generator)
    books = torch.randn(batch, 2, 2, ksub, dsub, generator=generator)
    if is_exact:
        query, books, scale = query.round(), books.round(), math.log(2) / 4
    # Some pairs are frequent, some do not occur.
    codes = (ksub * torch.rand(batch, 2, num_positions, 2, generator=generator).square()).to(torch.uint8)
    begin, end = torch.tensor(spans).T
    for b, (first, last) in enumerate(spans):
        codes[b, :, :first] = 255
        codes[b, :, last:] = 255
    seats = seats_of(batch, device)
    return [
        query.to(device, dtype),
        seated(books.to(device), seats, float("nan")),
        seated(codes.to(device), seats, 255),
        seated(count_pairs(codes, spans, ksub).to(device), seats, 10**6),
        seats,
        begin.to(device),
        end.to(device),
        torch.tensor(asked, device=device),
        max(asked),
        num_positions,
        scale,
    ]


def count_pairs(codes: Tensor, spans: Spans, ksub: int) -> Tensor:
    counts = torch.zeros(*codes.shape[:2], ksub * ksub, dtype=torch.int32)
    for b, (first, last) in enumerate(spans):
        pairs = codes[b, :, first:last, 0].long() * ksub + codes[b, :, first:last, 1]
        counts[b].scatter_add_(1, pairs, torch.ones_like(pairs, dtype=torch.int32))
    return counts


def best_by_sorting(arguments: list[Any]) -> list[list[list[int]]]:
    query, books, codes, _, seats, begin, end, asked, width, _, scale = arguments
    taken = []
    for b, seat in enumerate(seats.tolist()):
        taken.append([])
        for head, of_group in enumerate(query[b].double().chunk(2)):
            first, last = int(begin[b]), int(end[b])
            pairs = [tuple(pair) for pair in codes[seat, head, first:last].tolist()]
            # Equal codes, equal weight: also where a product of matrices rounds its rows differently.
            unique = list(dict.fromkeys(pairs))
            keys = books[seat, head].double().new_empty(len(unique), of_group.shape[1])
            for row, pair in enumerate(unique):
                keys[row] = torch.cat([books[seat, head, part, code] for part, code in enumerate(pair)])
            scores = (keys @ of_group.T * scale)[[unique.index(pair) for pair in pairs]]
            weights = scores.softmax(0).sum(1).tolist()
            order = sorted(range(last - first), key=lambda i, weights=weights: (-weights[i], -i))
            best = sorted(first + i for i in order[: int(asked[b])])
            taken[-1].append(best + [-1] * (width - len(best)))
    return taken


@pytest.mark.parametrize(("group", "book"), [(1, (6, 5)), (3, (64, 5)), (4, (2, 5)), (7, (64, 5))])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_best_candidates_are_taken_and_of_equals_the_last(
    group: int, book: tuple[int, int], share: float
) -> None:
    spans = ((4, 90), (0, 1), (20, 57))
    asked = tuple(int(share * (end - begin)) for begin, end in spans)
    arguments = problem(torch.device("cpu"), spans, asked, 90, group, book)
    assert reference.pq_select(*arguments).tolist() == best_by_sorting(arguments)


def check(arguments: list[Any]) -> None:
    """The same positions, or where rounding chose others, such of the same weight."""
    taken, expected = kernel.pq_select(*arguments), reference.pq_select(*arguments)
    assert taken.dtype == torch.int64
    assert taken.shape == expected.shape
    is_taken = taken >= 0
    assert torch.equal(is_taken, expected >= 0)
    assert ((taken[..., 1:] > taken[..., :-1]) | ~is_taken[..., 1:]).all()
    query, books, codes, _, seats, begin, end, _, _, num_positions, scale = arguments
    scores = pq_score(query, books, codes, seats, begin, end, scale, num_positions)
    weights, best = (
        scores.gather(-1, some.clamp(min=0)).masked_fill(some < 0, 0).sort(dim=-1).values
        for some in (taken, expected)
    )
    torch.testing.assert_close(weights, best, atol=1e-7, rtol=1e-4)


def check_exact(arguments: list[Any]) -> None:
    for module in kernel, reference:
        assert module.pq_select(*arguments).tolist() == best_by_sorting(arguments)


@pytest.mark.parametrize(("group", "num_positions"), [(1, 4200), (3, 65), (7, 65), (16, 4200)])
def test_the_best_are_those_of_the_reference(device: torch.device, group: int, num_positions: int) -> None:
    spans = ((0, num_positions), (num_positions // 3, max(num_positions - 5, num_positions // 3 + 1)))
    asked = (max(1, num_positions // 9), num_positions // 2)
    check(problem(device, spans, asked, num_positions, group))


def test_a_single_candidate(device: torch.device) -> None:
    check_exact(problem(device, ((0, 1), (0, 0)), (1, 0), 1))


@pytest.mark.parametrize(
    ("book", "dtype"),
    [
        ((2, 5), torch.float16),
        ((16, 48), torch.bfloat16),
        ((20, 16), torch.bfloat16),
        ((64, 64), torch.float16),
        ((128, 24), torch.bfloat16),
    ],
)
def test_books_and_queries_of_16_bits(
    device: torch.device, book: tuple[int, int], dtype: torch.dtype
) -> None:
    check(problem(device, ((7, 590), (0, 601)), (30, 500), 601, 2, book, dtype))


@pytest.mark.parametrize("book", [(64, 2), (100, 2)])
def test_ties_within_a_pair_and_between_pairs_go_to_the_higher_position(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, book: tuple[int, int]
) -> None:
    # Rows of several chunks of several tiles, and several tiles a writer.
    monkeypatch.setattr("gpu_worker.policies.pqcache.pq_select.kernel.TILE", 64)
    monkeypatch.setattr("gpu_worker.policies.pqcache.pq_select.kernel.PROGRAMS", 16)
    monkeypatch.setattr("gpu_worker.policies.pqcache.pq_select.kernel.WRITERS", 24)
    spans, asked = ((0, 601), (70, 500), (127, 129), (384, 601)), (200, 40, 1, 217)
    check_exact(problem(device, spans, asked, 601, 1, book, is_exact=True))


def test_of_equal_candidates_the_last_are_taken(device: torch.device) -> None:
    arguments = problem(device, ((3, 5000),), (700,), 5003)
    arguments[2][:] = 9
    arguments[3][:] = 0
    arguments[3][..., 9 * 64 + 9] = 4997
    assert torch.equal(kernel.pq_select(*arguments)[0, 1].cpu(), torch.arange(4300, 5000))


def test_rows_that_ask_for_nothing_or_for_more_than_there_is(device: torch.device) -> None:
    spans, asked = ((5, 60), (20, 20), (40, 12), (0, 70), (0, 0)), (0, 5, 5, 75, 0)
    arguments = problem(device, spans, asked, 70, 3)
    taken = kernel.pq_select(*arguments).cpu()
    assert (taken[[0, 1, 2, 4]] == -1).all()
    assert (taken[3] == torch.cat([torch.arange(70), torch.full((5,), -1)])).all()
    check_exact(arguments)
    # Nothing of a seat is read for a row that asks for nothing.
    arguments[1][arguments[4][0]] = float("nan")
    assert torch.equal(kernel.pq_select(*arguments).cpu(), taken)


@pytest.mark.parametrize("scale", [0.0, 40.0])
def test_scores_far_apart_neither_overflow_nor_vanish(device: torch.device, scale: float) -> None:
    check(problem(device, ((1, 299),), (30,), 300, scale=scale))
    # The codes of the largest products never meet: a bound of the largest score would make every weight vanish.
    arguments = problem(device, ((0, 4),), (2,), 4, 1, (64, 2), scale=scale)
    arguments[0][:] = torch.tensor([1.0, 0, 1, 0], device=device)
    arguments[1][:] = 0
    arguments[1][:, :, 0, :4, 0] = torch.tensor([1000.0, 999, -1000, -1001], device=device)
    arguments[1][:, :, 1, :4, 0] = torch.tensor([-1000.5, -1000.25, 999.9, 1000.8], device=device)
    codes = torch.tensor([[0, 0], [1, 1], [2, 2], [3, 3]])
    arguments[2][:] = codes.to(device, torch.uint8)
    arguments[3][:] = 0
    arguments[3][..., codes[:, 0] * 65] = 1
    # Sums: -0.5, -1.25, -0.1, -0.2.
    assert kernel.pq_select(*arguments)[0].tolist() == [[2, 3]] * 2


def test_unused_centroids_may_be_anything(device: torch.device) -> None:
    arguments = problem(device, ((4, 80),), (20,), 90, 3)
    arguments[2][:, :, 4:80] %= 50
    index = arguments[2][arguments[4]].cpu()
    arguments[3][arguments[4]] = count_pairs(index, ((4, 80),), 64).to(device)
    clean = kernel.pq_select(*arguments)
    arguments[1][:, :, :, 50:] = float("nan")
    assert torch.equal(kernel.pq_select(*arguments), clean)


def test_the_bound_of_positions_may_be_loose_or_below_the_index(device: torch.device) -> None:
    arguments = problem(device, ((4, 300), (0, 17)), (50, 9), 500, 3)
    expected = kernel.pq_select(*arguments)
    arguments[-2] = 301
    assert torch.equal(kernel.pq_select(*arguments), expected)
    arguments[-2] = 0
    assert (kernel.pq_select(*arguments) == -1).all()


def test_candidates_and_pairs_may_be_too_many_for_one_word(device: torch.device) -> None:
    assert [kernel.count_bits(n, 64**2) for n in (2**18 - 1, 2**18)] == [18, 32]
    check(problem(device, ((0, 70_000),), (900,), 70_000, 1, (128, 16)))


def test_what_has_no_table_of_pairs_is_refused(device: torch.device) -> None:
    arguments = problem(device, ((0, 5),), (2,), 5)
    for shape, message in (((3, 2, 4, 64, 16), "4 parts"), ((3, 2, 2, 256, 32), "256 centroids")):
        for module in kernel, reference:
            with pytest.raises(ValueError, match=message):
                module.pq_select(arguments[0], torch.empty(shape, device=device), *arguments[2:])
