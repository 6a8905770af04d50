"""Operations that take the best positions of every head, ascending, and of equals the higher; -1 pads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from kernel_contract import Arguments, Operation, Refusal, case
from seat_rig import at_seats, seats_of
from torch import Tensor, bfloat16, float16, float32

from gpu_worker.policies.pqcache.pq_score.reference import pq_score
from operations.pages import Spans, two_spans

# Rows of up to this many scores take one launch, where no more than half as many are asked for.
TILE = 2048
# Of `best_rows`: rows of a tile, and chunks of them that are read at a time.
ROWS, CHUNKS = 2048, 128


def best(keys: Sequence[tuple[float, ...]], count: int, width: int) -> list[int]:
    """-inf is not a candidate, and NaN neither."""
    candidates = [(*key, place) for place, key in enumerate(keys) if key[0] > -math.inf]
    taken = sorted(place for *_, place in sorted(candidates, reverse=True)[: min(count, width)])
    return taken + [-1] * (width - len(taken))


def mixed(num: int, seed: int) -> Tensor:
    """Six rows: distinct scores; ties; all equal; few candidates with NaN and infinity; zeros of both signs; half -inf,
    the rest ties."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(6, num, generator=generator)
    rows[1] = (rows[1] * 2).round()
    rows[2] = -3.0
    rows[3, torch.rand(num, generator=generator) < 0.95] = -math.inf
    rows[3, ::7], rows[3, 5::11] = math.nan, math.inf
    rows[4] = torch.where(rows[4] > 0, 0.0, -0.0)
    rows[5] = rows[5].round()
    rows[5, torch.rand(num, generator=generator) < 0.5] = -math.inf
    return rows


def rows_to_take(num: int, counts: tuple[int, ...] | int, has_second: bool = False) -> Arguments:
    """counts: of each head, or one number for every head, which is the width. A second score breaks ties; it has ties
    of its own, infinities and NaN."""
    first = mixed(num, num)
    if isinstance(counts, int):
        asked, width = None, counts
    else:
        first, asked, width = first[: len(counts)], torch.tensor(counts), max(counts)
    second = mixed(num, num + 1).roll(1, 0)[: len(first)] if has_second else None
    return {"first": first, "counts": asked, "width": width, "second": second}


def last_bits() -> Arguments:
    """Scores that differ in their last bits."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(0, 40, (3, ROWS + 500), generator=generator, dtype=torch.int32)
    first = (bits + 0x3F800000).view(float32) * torch.tensor([1.0, -1.0, 1e-30])[:, None]
    return {"first": first, "counts": torch.tensor([700, 700, 1]), "width": 700, "second": first.flip(1)}


def more_than_the_width() -> Arguments:
    return {"first": torch.arange(5.0)[None], "counts": torch.tensor([4]), "width": 2, "second": None}


def best_of_rows(first: Tensor, counts: Tensor | None, width: int, second: Tensor | None) -> Tensor:
    asked = [width] * len(first) if counts is None else counts.tolist()
    ties = (first if second is None else second).nan_to_num(-math.inf, math.inf, -math.inf).tolist()
    heads = zip(first.tolist(), ties, asked, strict=True)
    found = [best([*zip(own, tie, strict=True)], count, width) for own, tie, count in heads]
    return torch.tensor(found, dtype=torch.int64).view(len(first), width)


def scores_to_take(
    draw: Callable[[torch.Generator], Tensor], counts: tuple[int, ...], width: int = 0
) -> Arguments:
    scores = draw(torch.Generator().manual_seed(0))
    return {"scores": scores, "counts": torch.tensor(counts), "width": width or max(counts)}


def of(num: int, rows: int = 3) -> Callable[[torch.Generator], Tensor]:
    return named(
        f"mixed {num}",
        lambda _: mixed(num, num).nan_to_num(-math.inf, math.inf, -math.inf).view(3, 2, num)[:rows],
    )


def named(name: str, draw: Callable[[torch.Generator], Tensor]) -> Callable[[torch.Generator], Tensor]:
    """A draw that is called so in the name of its case."""
    return type(name, (), {"__call__": lambda _, generator: draw(generator), "__str__": lambda _: name})()


def raised(
    name: str, num: int, places: Callable[[Tensor], Tensor], by: float = 50.0
) -> Callable[..., Tensor]:
    """Two heads of random scores; those at some places are larger."""

    def draw(generator: torch.Generator) -> Tensor:
        return torch.randn(1, 2, num, generator=generator) + by * places(torch.arange(num))

    return named(name, draw)


def columns(num_values: int, num_columns: int) -> Callable[..., Tensor]:
    """Fewer columns than asked for hold all good scores, so that what is listed outgrows a tile."""

    def draw(generator: torch.Generator) -> Tensor:
        scores = torch.randint(0, num_values, (1, 2, 6 * TILE), generator=generator).float()
        return scores + 1e6 * (
            torch.arange(6 * TILE) % TILE < torch.tensor([[num_columns], [num_columns // 2]])
        )

    return named(f"columns {num_values} {num_columns}", draw)


def columns_of_the_list(generator: torch.Generator) -> Tensor:
    """900 good columns: of what is listed, the best lie in 400 of its own columns."""
    scores = torch.rand(1, 1, 14 * TILE, generator=generator)
    good = (torch.arange(14 * TILE) % TILE < 900).nonzero()[:, 0]
    scores[0, 0, good] += 10
    scores[0, 0, good[torch.arange(len(good)) % TILE < 400]] += 10
    return scores


def chunks_of_tiles(generator: torch.Generator) -> Tensor:
    scores = torch.randn(1, 3, 4 * TILE + 300, generator=generator)
    scores[0, 1] = scores[0, 1].mul_(4).round()
    scores[0, 2, 2000:2900] += 50
    return scores


def extremes(num: int) -> Callable[[torch.Generator], Tensor]:
    limits = torch.finfo(float32)
    values = (
        limits.min,
        -1,
        -limits.tiny,
        -1e-45,
        -0.0,
        0.0,
        1e-45,
        3e-45,
        limits.tiny,
        limits.max,
        math.inf,
    )

    def draw(generator: torch.Generator) -> Tensor:
        scores = torch.full((1, 1, num), -math.inf)
        scores[0, 0, torch.randperm(num, generator=generator)[: len(values)]] = torch.tensor(values)
        return scores

    return named(f"extremes {num}", draw)


def best_of_scores(scores: Tensor, counts: Tensor, width: int) -> Tensor:
    rows = zip(scores.tolist(), counts.tolist(), strict=True)
    return torch.tensor([[best([(x,) for x in head], count, width) for head in row] for row, count in rows])


def pairs(
    spans: Spans, asked: tuple[int, ...], num: int, group: int = 4, book: tuple[int, int] = (64, 32),
    dtype: torch.dtype = float32, is_exact: bool = False, scale: float = 0.3, bound: int | None = None,
    one_pair: bool = False,
) -> Arguments:  # fmt: skip
    """Two KV heads of product-quantised keys. book: ksub, d/2. one_pair: all candidates have the same codes.

    Outside the candidates lies any byte, in other seats NaN; every fourth centroid of large books is unused and NaN.
    is_exact: scores are multiples of 1/4 in base 2, so that no rounding changes an order, and ties of pairs abound.
    """
    ksub, dsub = book
    batch, generator = len(spans), torch.Generator().manual_seed(num)
    query = torch.randn(batch, 2 * group, 2 * dsub, generator=generator)
    books = torch.randn(batch, 2, 2, ksub, dsub, generator=generator)
    if is_exact:
        query, books, scale = query.round(), books.round(), math.log(2) / 4
    # Some pairs are frequent, some do not occur.
    codes = (ksub * torch.rand(batch, 2, num, 2, generator=generator).square()).long()
    if ksub >= 8:
        codes[codes % 4 == 3] -= 1
        books[:, :, :, 3::4] = math.nan
    codes = codes * (not one_pair)
    counts = torch.zeros(batch, 2, ksub * ksub, dtype=torch.int32)
    for row, (first, last) in enumerate(spans):
        of_pairs = codes[row, :, first:last, 0] * ksub + codes[row, :, first:last, 1]
        counts[row].scatter_add_(1, of_pairs, torch.ones_like(of_pairs, dtype=torch.int32))
        codes[row, :, :first], codes[row, :, last:] = 255, 255
        # Nothing of a seat is read for a row that asks for nothing.
        if not asked[row]:
            books[row] = math.nan
    seats = seats_of(batch, torch.device("cpu"))
    begin, end = torch.tensor(spans).T
    return {
        "query": query.to(dtype),
        "codebooks": at_seats(books, seats, math.nan),
        "codes": at_seats(codes.to(torch.uint8), seats, 255),
        "pair_counts": at_seats(counts, seats, 10**6),
        **{"seats": seats, "begin": begin, "end": end, "counts": torch.tensor(asked)},
        **{"width": max(asked), "num_positions": num if bound is None else bound, "scale": scale},
    }


def best_of_pairs(
    query: Tensor, codebooks: Tensor, codes: Tensor, pair_counts: Tensor, seats: Tensor, begin: Tensor, end: Tensor,
    counts: Tensor, width: int, num_positions: int, scale: float,
) -> Tensor:  # fmt: skip
    """Equal codes, equal weight: also where a product of matrices rounds its rows differently."""
    taken = torch.full((len(seats), 2, width), -1)
    spans = torch.stack([seats, begin, end.clamp(max=num_positions), counts], dim=1).tolist()
    for row, (seat, first, last, count) in enumerate(spans):
        for head, heads in enumerate(query[row].double().chunk(2) if last > first and count else ()):
            unique, places = codes[seat, head, first:last].long().unique(dim=0, return_inverse=True)
            books = codebooks[seat, head].double()
            keys = torch.cat([books[0, unique[:, 0]], books[1, unique[:, 1]]], dim=1)
            weights = (keys @ heads.T * scale)[places].softmax(0).sum(1)
            found = torch.tensor(best([(weight,) for weight in weights.tolist()], count, width))
            taken[row, head] = found.where(found < 0, found + first)
    return taken


def agree_on_pairs(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], arguments: Arguments) -> None:
    """The same positions, or where rounding chose others, such of the same weight."""
    taken, exact = found[0], expected[0]
    if arguments["scale"] == math.log(2) / 4:
        assert torch.equal(taken, exact)
        return
    assert taken.shape == exact.shape
    is_taken = taken >= 0
    assert torch.equal(is_taken, exact >= 0)
    assert ((taken[..., 1:] > taken[..., :-1]) | ~is_taken[..., 1:]).all()
    names = ("query", "codebooks", "codes", "seats", "begin", "end")
    scores = pq_score(*(arguments[name] for name in names), arguments["scale"], arguments["codes"].shape[2])
    weights, most = (
        scores.gather(-1, some.clamp(min=0)).masked_fill(some < 0, 0).sort(dim=-1).values
        for some in (taken, exact)
    )
    torch.testing.assert_close(weights, most, atol=1e-7, rtol=1e-4)


PROGRAMS = ({"TILE_OF_ONE": 1024}, {"MOST_IN_ONE": 0})
MANY = {"TILE": 64, "PROGRAMS": 16, "WRITERS": 24}
NOTHING = ((5, 60), (20, 20), (40, 12), (0, 70), (0, 0))
OPERATIONS = (
    Operation(
        package="gpu_worker.kernels.best_rows",
        function="best_rows",
        exact=best_of_rows,
        cases=(
            # More chunks than are read at a time.
            case(rows_to_take, 64 * (CHUNKS + 2) + 5, (2000,), settings={"TILE": 64, "MOST_IN_ONE": 0}),
            *(
                case(*each, settings=settings)
                for settings in PROGRAMS
                for each in (
                    *(
                        (rows_to_take, num, (min(num, 900), 33, num // 3, num, 5, 77), second)
                        for num in (ROWS + 1, 1, 65, ROWS - 1, 3 * ROWS + 13)
                        for second in (False, True)
                    ),
                    *(
                        (rows_to_take, num, width, num == ROWS + 1)
                        for num in (65, ROWS + 1)
                        for width in (num // 3, num, num + 2)
                    ),
                    (rows_to_take, 50, (0, 7, 0, 0, 1)),
                    (rows_to_take, 0, (0, 3)),
                    (rows_to_take, 3, (0, 0)),
                    (last_bits,),
                    (more_than_the_width,),
                )
            ),
        ),
        refusals=(
            Refusal("float64, not float32", lambda a: {"first": a["first"].double()}, kernel_only=True),
        ),
    ),
    Operation(
        package="gpu_worker.kernels.top_k",
        function="top_k",
        exact=best_of_scores,
        strides={"scores": 3, "counts": 1},
        captured=True,
        refusals=(Refusal("float64", lambda a: {"scores": a["scores"].double()}, kernel_only=True),),
        cases=(
            *(case(scores_to_take, of(num), (7, 300, 64)) for num in (TILE, 65, 3 * TILE + 13)),
            *(case(scores_to_take, of(num), (1, 0, 900)) for num in (TILE + 1, 1, TILE - 1)),
            case(scores_to_take, of(50), (3, 1, 2), 70),
            *(
                case(scores_to_take, of(*size), counts)
                for size, counts in (((9000, 1), (4096,)), ((9000, 1), (1025,)), ((4200, 2), (5000, 4199)))
            ),
            *(case(scores_to_take, columns(*size), (1000,)) for size in ((3, 1200), (100_000, 700))),
            case(scores_to_take, named("columns of the list", columns_of_the_list), (1000,)),
            case(
                scores_to_take,
                raised("one place", 5 * TILE, lambda n: (n > 3 * TILE - 100) & (n < 3 * TILE + 900)),
                (950,),
            ),
            case(scores_to_take, raised("the end", 5 * TILE, lambda n: n >= 5 * TILE - 1000, 1e9), (950,)),
            case(scores_to_take, raised("one chunk", 14 * TILE, lambda n: n // TILE == 5), (950,)),
            # As many rows have chunks of several tiles.
            case(
                scores_to_take,
                named("chunks of tiles", chunks_of_tiles),
                (700,),
                settings={"_chunk_tiles": lambda rows, num_tiles: 2},
            ),
            *(
                case(scores_to_take, extremes(num), (count,))
                for num in (TILE, 2 * TILE + 5)
                for count in (4, 6, 9, 12)
            ),
        ),
    ),
    Operation(
        package="gpu_worker.policies.pqcache.pq_select",
        function="pq_select",
        exact=best_of_pairs,
        agree=agree_on_pairs,
        strides={"query": 3, "codebooks": 2, "codes": 2, "pair_counts": 2},
        captured=True,
        cases=(
            *(
                case(pairs, two_spans(num), (max(1, num // 9), num // 2), num, group)
                for group, num in ((3, 65), (1, 4200), (7, 65), (16, 4200))
            ),
            *(
                case(pairs, ((7, 590), (0, 601)), (30, 500), 601, 2, *kind)
                for kind in (
                    ((2, 5), float16),
                    ((16, 48), bfloat16),
                    ((20, 16), bfloat16),
                    ((64, 64), float16),
                    ((128, 24), bfloat16),
                )
            ),
            *(
                case(pairs, ((4, 90), (0, 1), (20, 57)), asked, 90, group, book, is_exact=True)
                for asked in ((8, 0, 3), (43, 0, 18), (86, 1, 37))
                for group, book in ((1, (6, 5)), (3, (64, 5)), (4, (2, 5)))
            ),
            # Rows of several chunks of several tiles, and several tiles a writer.
            *(
                case(
                    pairs,
                    ((0, 601), (70, 500), (127, 129), (384, 601)),
                    (200, 40, 1, 217),
                    601,
                    1,
                    book,
                    is_exact=True,
                    settings=MANY,
                )
                for book in ((64, 2), (100, 2))
            ),
            case(pairs, ((3, 5000),), (700,), 5003, is_exact=True, one_pair=True),
            case(pairs, NOTHING, (0, 5, 5, 75, 0), 70, 3, is_exact=True),
            case(pairs, ((0, 1), (0, 0)), (1, 0), 1, is_exact=True),
            *(case(pairs, ((1, 299),), (30,), 300, scale=scale) for scale in (0.0, 40.0)),
            *(case(pairs, ((4, 300), (0, 17)), (50, 9), 500, 3, bound=bound) for bound in (301, 0)),
            # Candidates and pairs are too many for one word.
            case(pairs, ((0, 70_000),), (900,), 70_000, 1, (128, 16)),
        ),
        refusals=tuple(
            Refusal(message, lambda _, shape=shape: {"codebooks": torch.empty(shape)})
            for shape, message in (((3, 2, 4, 64, 16), "4 parts"), ((3, 2, 2, 256, 32), "256 centroids"))
        ),
    ),
)
