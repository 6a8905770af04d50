"""Operations of methods that select whole pages or clusters: Quest's and ClusterKV's."""

from __future__ import annotations

import math

import torch
from kernel_contract import Arguments, Operation, case
from seat_rig import at_seats, seats_of
from torch import Tensor, bfloat16, float16, float32

Spans = tuple[tuple[int, int], ...]


def two_spans(num: int) -> Spans:
    return ((0, num), (num // 3, max(num - 5, num // 3 + 1)))


def pages(
    group: int, num_pages: int, spans: Spans, head_dim: int = 64, dtype: torch.dtype = float32, bound: int = 0
) -> Arguments:
    """Three KV heads; NaN wherever no page of a span is. bound: how many pages are asked for, if not all."""
    batch, generator = len(spans), torch.Generator().manual_seed(num_pages)
    query = torch.randn(batch, 3 * group, head_dim, generator=generator).to(dtype)
    keys = torch.randn(batch, 3, num_pages, 4, head_dim, generator=generator).to(dtype)
    seats = seats_of(batch, torch.device("cpu"))
    for row, (first, last) in enumerate(spans):
        keys[row, :, :first], keys[row, :, last:] = math.nan, math.nan
    begin, end = torch.tensor(spans).T
    extremes = {"key_min": keys.amin(dim=3), "key_max": keys.amax(dim=3)}
    extremes = {name: at_seats(each, seats, math.nan) for name, each in extremes.items()}
    where = {"seats": seats, "begin": begin, "end": end}
    return {"query": query, **extremes, **where, "num_pages": bound or num_pages}


def clusters(
    group: int,
    num_positions: int,
    num_clusters: int,
    spans: Spans,
    head_dim: int = 64,
    dtype: torch.dtype = float32,
    num_values: int = 9,
    bound: int | None = None,
) -> Arguments:
    """Three KV heads in small integers, so that products are exact and ties abound.

    Every third cluster and the last quarter are unused and hold NaN; junk lies outside the candidates.
    """
    batch, generator = len(spans), torch.Generator().manual_seed(num_positions)
    low, high = -(num_values // 2), num_values // 2 + 1
    query = torch.randint(low, high, (batch, 3 * group, head_dim), generator=generator).to(dtype)
    centroids = torch.randint(low, high, (batch, 3, num_clusters, head_dim), generator=generator).float()
    used = torch.tensor([c for c in range(num_clusters) if c == 0 or (c % 3 and 4 * c < 3 * num_clusters)])
    labels = used[torch.randint(0, len(used), (batch, 3, num_positions), generator=generator)]
    sizes = torch.zeros(batch, 3, num_clusters, dtype=torch.int64)
    within = torch.full(labels.shape, -99)
    for row, (first, last) in enumerate(spans):
        inside = torch.nn.functional.one_hot(labels[row, :, first:last], num_clusters)
        sizes[row] = inside.sum(dim=1)
        places = (inside.cumsum(dim=1) - 1).gather(-1, labels[row, :, first:last, None]).squeeze(-1)
        within[row, :, first:last] = places
        labels[row, :, :first], labels[row, :, last:] = -5, 10**6
    centroids[sizes == 0] = math.nan
    begin, end = torch.tensor(spans).T
    seats = seats_of(batch, torch.device("cpu"))
    index = {"sizes": sizes.int(), "labels": labels.int(), "within": within.int()}
    return {
        "query": query,
        "centroids": at_seats(centroids, seats, math.nan),
        **{name: at_seats(each, seats, 10**6) for name, each in index.items()},
        **{"seats": seats, "begin": begin, "end": end},
        "num_positions": num_positions if bound is None else bound,
    }


def places(**arguments: Tensor) -> Tensor:
    """Whole clusters, the best first and of equals the smaller: the n-th of their positions has place -n."""
    expected = torch.full((*arguments["query"].shape[:1], 3, int(arguments["num_positions"])), -torch.inf)
    spans = zip(
        arguments["begin"].tolist(), arguments["end"].tolist(), arguments["seats"].tolist(), strict=True
    )
    for row, (first, last, seat) in enumerate(spans):
        for head, heads in enumerate(arguments["query"][row].double().chunk(3)):
            labels = arguments["labels"][seat, head].tolist()
            products = (heads @ arguments["centroids"][seat, head].double().T).sum(0).tolist()
            ranked = sorted(range(first, last), key=lambda n: (-products[labels[n]], labels[n], n))
            for place, position in enumerate(ranked):
                if position < expected.shape[2]:
                    expected[row, head, position] = -place
    return expected


SIXTEEN = ((8, float16), (96, bfloat16), (128, float16))
EMPTY = ((20, 20), (5, 60), (0, 0))
OPERATIONS = (
    Operation(
        package="gpu_worker.policies.quest.page_bound",
        function="page_bound",
        atol=1e-4,
        rtol=1e-5,
        strides={"query": 3, "key_min": 4, "key_max": 3},
        captured=True,
        cases=(
            *(
                case(pages, group, num_pages, two_spans(num_pages))
                for group, num_pages in ((3, 63), (1, 1), (4, 64), (7, 65), (16, 300))
            ),
            *(case(pages, 4, 70, ((7, 66), (0, 70)), *kind) for kind in (*SIXTEEN, (64, bfloat16))),
            *(case(pages, 3, 70, EMPTY, bound=bound) for bound in (70, 61)),
        ),
    ),
    Operation(
        package="gpu_worker.policies.clusterkv.centroid_rank",
        function="centroid_rank",
        exact=places,
        strides={"query": 3, "centroids": 2, "sizes": 2, "labels": 3, "within": 3},
        captured=True,
        cases=(
            *(
                case(clusters, group, *size, two_spans(size[0]))
                for group, size in ((3, (63, 4)), (1, (1, 1)), (7, (65, 64)), (16, (900, 200)))
            ),
            *(case(clusters, 4, 150, 33, ((7, 140),), *kind) for kind in SIXTEEN),
            # Three values in two dimensions: a handful of products among 300 clusters.
            case(clusters, 1, 2000, 300, ((1, 1999), (0, 2000)), 2, num_values=3),
            case(
                clusters,
                2,
                301,
                20,
                ((0, 301), (40, 300), (96, 128), (300, 301)),
                settings={"BLOCK_TOKENS": 32},
            ),
            case(clusters, 3, 70, 20, EMPTY),
            *(case(clusters, 4, 90, 30, ((4, 71), (0, 60)), bound=bound) for bound in (71, 0)),
        ),
    ),
)
