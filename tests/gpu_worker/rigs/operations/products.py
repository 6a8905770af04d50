"""PQCache's operations on product-quantised keys."""

from __future__ import annotations

import math

import torch
from kernel_contract import Arguments, Operation, Refusal, case
from seat_rig import at_seats, seats_of
from torch import Tensor, bfloat16, float16, float32

from operations.pages import EMPTY, Spans, two_spans

Parts = tuple[int, int, int]


def coded_keys(
    group: int, num_positions: int, spans: Spans, parts: Parts = (2, 64, 32), dtype: torch.dtype = float32,
    bound: int | None = None, scale: float = 0.3, beside: bool = False,
) -> Arguments:  # fmt: skip
    """Three KV heads; any byte outside the candidates. parts: m, ksub, d/m. Every fourth centroid is unused and NaN.
    beside: other tokens are attended too, by two heads none."""
    num_parts, ksub, dsub = parts
    batch, generator = len(spans), torch.Generator().manual_seed(num_positions)
    query = torch.randn(batch, 3 * group, num_parts * dsub, generator=generator).to(dtype)
    codebooks = torch.randn(batch, 3, num_parts, ksub, dsub, generator=generator)
    codes = torch.randint(0, ksub, (batch, 3, num_positions, num_parts), generator=generator)
    if ksub >= 8:
        codes[codes % 4 == 3] -= 1
        codebooks[:, :, :, 3::4] = math.nan
    for row, (first, last) in enumerate(spans):
        codes[row, :, :first], codes[row, :, last:] = 255, 255
    seats = seats_of(batch, torch.device("cpu"))
    begin, end = torch.tensor(spans).T
    others = torch.linspace(-3, 9, batch * 3 * group).view(batch, -1)
    others[0, :2] = -torch.inf
    return {
        "query": query,
        "codebooks": at_seats(codebooks, seats, math.nan),
        "codes": at_seats(codes.to(torch.uint8), seats, 255),
        **{"seats": seats, "begin": begin, "end": end, "scale": scale},
        "num_positions": num_positions if bound is None else bound,
        "beside": others if beside else None,
    }


def weights(
    query: Tensor, codebooks: Tensor, codes: Tensor, seats: Tensor, begin: Tensor, end: Tensor, scale: float,
    num_positions: int, beside: Tensor | None,
) -> Tensor:  # fmt: skip
    """The softmax over decoded candidates, and what is attended beside them, summed over a group's heads."""
    batch, num_heads, _ = query.shape
    expected = torch.full((batch, 3, max(num_positions, codes.shape[2])), -torch.inf, dtype=torch.float64)
    others = torch.full((batch, num_heads), -torch.inf) if beside is None else beside
    for row, (seat, first, last) in enumerate(torch.stack([seats, begin, end], dim=1).tolist()):
        for head in range(3):
            own = slice(head * num_heads // 3, (head + 1) * num_heads // 3)
            of_parts = codes[seat, head, first:last].long().unbind(1)
            keys = [book[part] for book, part in zip(codebooks[seat, head].double(), of_parts, strict=True)]
            logits = query[row, own].double() @ torch.cat(keys, dim=1).T * scale
            every = torch.cat([logits, others[row, own, None].double()], dim=1)
            expected[row, head, first:last] = every.softmax(1)[:, :-1].sum(0)
    return expected[..., :num_positions]


def whole_keys(
    leading: tuple[int, ...], num_tokens: int, parts: Parts, of_books: tuple[int, ...]
) -> Arguments:
    """Small integers: distances are exact, and equal ones frequent."""
    num_parts, ksub, dsub = parts
    generator = torch.Generator().manual_seed(ksub)
    keys = torch.randint(-2, 3, (*leading, num_tokens, num_parts * dsub), generator=generator).float()
    return {"keys": keys, "codebooks": torch.randint(-1, 2, (*of_books, *parts), generator=generator).float()}


def real_keys(num_tokens: int, parts: Parts, dtype: torch.dtype) -> Arguments:
    """Centroids as means are, of more bits than the keys; some are keys."""
    generator = torch.Generator().manual_seed(5)
    keys = (4 * torch.randn(2, num_tokens, parts[0] * parts[2], generator=generator)).to(dtype)
    books = 4 * torch.randn(2, *parts, generator=generator)
    books[:, :, :9] = keys[:, :9].float().unflatten(2, (parts[0], parts[2])).transpose(1, 2)
    return {"keys": keys, "codebooks": books}


def distances(keys: Tensor, codebooks: Tensor) -> Tensor:
    """[..., n, m, ksub]: of every part of a key to every centroid, squared."""
    parts = keys.double().unflatten(-1, (codebooks.shape[-3], codebooks.shape[-1]))
    return (parts[..., None, :] - codebooks.double()[..., None, :, :, :]).square().sum(-1)


def smallest(away: Tensor) -> Tensor:
    """The nearest centroid, of equally near ones the first."""
    every = torch.arange(away.shape[-1]).expand(away.shape)
    return every.where(away == away.amin(-1, keepdim=True), away.shape[-1]).amin(-1)


def agree_on_codes(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], arguments: Arguments) -> None:
    """The nearest, of equally near ones the smallest; or one as near but for rounding."""
    codes, away = found[0].long(), expected[0]
    if torch.equal(arguments["keys"], arguments["keys"].round()):
        assert torch.equal(codes, smallest(away))
    else:
        torch.testing.assert_close(
            away.gather(-1, codes[..., None])[..., 0], away.amin(-1), atol=1e-3, rtol=0
        )
        of_keys = torch.arange(9)[:, None].expand(-1, codes.shape[-1])
        assert torch.equal(codes[:, :9], of_keys.expand(2, -1, -1))


def leaving(
    parts: Parts, positions: list[int], dtype: torch.dtype = float32, is_counted: bool = True
) -> Arguments:
    """One token a lane, in two layers of three KV heads, of small integers; -1: none."""
    num_parts, ksub, dsub = parts
    batch, generator = len(positions), torch.Generator().manual_seed(ksub)
    keys = torch.randint(-2, 3, (batch, 2, 3, num_parts * dsub), generator=generator).to(dtype)
    seats = seats_of(batch, torch.device("cpu"))
    books = torch.randint(-1, 2, (batch, 2, 3, *parts), generator=generator).float()
    counts = torch.arange(ksub**2, dtype=torch.int32).repeat(batch + 2, 2, 3, 1)
    return {
        "keys": keys,
        "codebooks": at_seats(books, seats, math.nan),
        "codes": torch.full((batch + 2, 2, 3, 40, num_parts), 255, dtype=torch.uint8),
        "pair_counts": counts if is_counted else None,
        "seats": seats,
        "positions": torch.tensor(positions),
    }


def own_centroids() -> Arguments:
    """A lane's key is the s-th centroid of its first part, the s-th last of its second."""
    books = torch.randn(64, 1, 1, 2, 64, 24, generator=torch.Generator().manual_seed(3))
    every = torch.arange(64)
    keys = torch.cat([books[every, 0, 0, 0, every], books[every, 0, 0, 1, 63 - every]], dim=-1)
    codes = torch.zeros(64, 1, 1, 2, 2, dtype=torch.uint8)
    where = {"pair_counts": None, "seats": every, "positions": torch.ones_like(every)}
    return {"keys": keys.view(64, 1, 1, 48), "codebooks": books, "codes": codes, **where}


def appended(
    keys: Tensor,
    codebooks: Tensor,
    codes: Tensor,
    pair_counts: Tensor | None,
    seats: Tensor,
    positions: Tensor,
) -> tuple[Tensor | None, ...]:
    ksub = codebooks.shape[4]
    for row, (seat, position) in enumerate(zip(seats.tolist(), positions.tolist(), strict=True)):
        if position >= 0:
            found = distances(keys[row, :, :, None], codebooks[seat])[:, :, 0]
            found = smallest(found)
            codes[seat, :, :, position] = found.to(torch.uint8)
            if pair_counts is not None:
                pairs = (found[..., 0] * ksub + found[..., 1])[..., None]
                pair_counts[seat].scatter_add_(2, pairs, torch.ones_like(pairs, dtype=torch.int32))
    return codes, pair_counts


CHUNKED = {"NUM_CHUNKS": 4, "TILE_ELEMENTS": 128}
OPERATIONS = (
    Operation(
        package="gpu_worker.policies.pqcache.pq_score",
        function="pq_score",
        exact=weights,
        atol=1e-6,
        rtol=1e-4,
        strides={"query": 3, "codebooks": 2, "codes": 4, "beside": 2},
        captured=True,
        cases=(
            *(
                case(coded_keys, group, num, two_spans(num))
                for group, num in ((3, 700), (1, 65), (4, 1), (7, 65), (16, 700))
            ),
            *(
                case(coded_keys, 4, 130, ((7, 120), (0, 130)), parts)
                for parts in ((1, 2, 64), (1, 256, 96), (4, 16, 24), (16, 8, 4), (3, 200, 5))
            ),
            *(case(coded_keys, 4, 100, ((3, 99),), dtype=kind) for kind in (float16, bfloat16)),
            # Tiles of 32: chunks of three, the last of two; candidates that begin or end within a tile, or fill one.
            case(coded_keys, 4, 361, ((0, 361), (40, 300), (96, 128), (359, 361)), settings=CHUNKED),
            case(coded_keys, 3, 70, (*EMPTY, (40, 12))),
            case(coded_keys, 4, 130, ((7, 120), (0, 130)), beside=True),
            *(case(coded_keys, 4, 90, ((4, 71), (0, 60)), bound=bound) for bound in (71, 0)),
        ),
    ),
    Operation(
        package="gpu_worker.policies.pqcache.pq_score",
        kernel="assign_kernel",
        function="pq_assign",
        exact=distances,
        agree=agree_on_codes,
        strides={"keys": 4},
        cases=(
            *(
                case(whole_keys, (2, 3), num, parts, (2, 3))
                for num, parts in (
                    (65, (1, 2, 5)),
                    (1, (2, 64, 32)),
                    (16, (3, 200, 16)),
                    (17, (16, 256, 4)),
                    (65, (1, 100, 128)),
                )
            ),
            # A codebook serves several rows.
            *(case(whole_keys, (2, 3), num, (2, 9, 12), (3,)) for num in (7, 0)),
            *(
                case(real_keys, 150, *kind)
                for kind in (((2, 64, 64), float32), ((3, 40, 32), float16), ((2, 64, 64), bfloat16))
            ),
        ),
    ),
    Operation(
        package="gpu_worker.policies.pqcache.pq_append",
        function="pq_append",
        exact=appended,
        writes=("codes", "pair_counts"),
        strides={"keys": 4, "codebooks": 3, "codes": 3, "pair_counts": 3},
        lanes=("keys", "seats", "positions"),
        captured=True,
        cases=(
            *(
                case(leaving, parts, [7, -1, 0, 39], kind)
                for parts in ((2, 64, 32), (2, 2, 5), (2, 100, 64), (2, 128, 128))
                for kind in (float32, bfloat16)
            ),
            *(
                case(leaving, parts, [3, 30], float16, is_counted=False)
                for parts in ((1, 256, 96), (3, 200, 16), (16, 256, 4))
            ),
            case(leaving, (2, 50, 12), [8, 1], settings={"TILE_ELEMENTS": 64}),
            case(leaving, (2, 16, 8), [-1, -1]),
            case(own_centroids),
        ),
        refusals=(Refusal("3 parts", lambda _: leaving((3, 16, 8), [1])),),
    ),
)
