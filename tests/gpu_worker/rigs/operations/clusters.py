"""The two halves of a K-means round."""

from __future__ import annotations

import torch
from kernel_contract import Arguments, Operation, case
from torch import Tensor, bfloat16, float16, float32

from gpu_worker.kernels.kmeans import cluster_sizes, sort_members


def points_and_targets(
    num_points: int,
    num_targets: int,
    width: int,
    dtype: torch.dtype = float32,
    less: str = "none",
    ties: str = "",
) -> Arguments:
    """less: what each target's product is less by: nothing, half of its square, or infinity but for the last one.
    ties: "repeated" targets, or "zero" ones, and whole numbers: equal targets have equal products, in whatever order
    they are added."""
    generator = torch.Generator().manual_seed(num_points + width)
    points = torch.randn(2, num_points, width, generator=generator)
    targets = torch.randn(2, num_targets, width, generator=generator)
    if ties:
        points, targets = (4 * points).round(), (4 * targets).round()
        targets[:, 130:] = targets[:, : num_targets - 130]
        targets *= ties != "zero"
    points, targets = points.to(dtype), targets.to(dtype)
    own = {"half": targets.float().square().sum(-1) / 2, "ones": torch.ones(2, num_targets)}
    own["last only"] = torch.full((2, num_targets), torch.inf)
    own["last only"][:, -1] = 1e6
    return {"points": points, "targets": targets, "less": own.get(less)}


def scores(points: Tensor, targets: Tensor, less: Tensor | None) -> Tensor:
    products = points.double() @ targets.double().mT
    return products if less is None else products - less.double()[:, None]


def agree_on_targets(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], arguments: Arguments) -> None:
    """The largest score, of equals the first; or one that is as large but for rounding."""
    (labels,), (exact,) = found, expected
    if not labels.numel():
        return
    best = exact.argmax(dim=-1)
    taken = exact.gather(2, labels.long()[..., None])[..., 0]
    torch.testing.assert_close(taken, exact.amax(-1), atol=1e-4, rtol=1e-5)
    is_whole = torch.equal(arguments["points"], arguments["points"].round())
    assert (labels == best).float().mean() >= (1.0 if is_whole else 0.99)


def members(
    num_points: int,
    num_clusters: int,
    width: int,
    dtype: torch.dtype,
    is_unit: bool,
    labels: tuple[int, ...] | None = None,
) -> Arguments:
    """Two problems. Unless labels are given, the last cluster is empty."""
    generator = torch.Generator().manual_seed(num_points + width)
    points = torch.randn(2, num_points, width, generator=generator).to(dtype)
    of_points = torch.randint(0, max(1, num_clusters - 1), (2, num_points), generator=generator)
    if labels is not None:
        of_points = torch.tensor(labels).repeat(2, 1)
    order, ends = sort_members(of_points, num_clusters)
    return {"points": points, "order": order, "ends": ends, "is_unit": is_unit}


def moved(points: Tensor, order: Tensor, ends: Tensor, is_unit: bool) -> tuple[Tensor, ...]:
    """Means of members. The i-th empty cluster lies beside the i-th largest of those with members, in turn."""
    flat, sizes = points.double().flatten(0, 1), cluster_sizes(ends)
    means = torch.zeros(*ends.shape, points.shape[2], dtype=torch.float64)
    for problem, cluster in torch.cartesian_prod(*map(torch.arange, ends.shape)).tolist():
        end, size = int(ends[problem, cluster]), int(sizes[problem, cluster])
        if size:
            means[problem, cluster] = flat[order[end - size : end]].mean(0)
    beside = 1 + torch.tensor([1.0, -1.0]).repeat(points.shape[2])[: points.shape[2]].double() / 1024
    for problem, of_problem in enumerate(sizes.tolist()):
        donors = sorted((c for c, size in enumerate(of_problem) if size), key=lambda c: -of_problem[c])
        for place, cluster in enumerate(c for c, size in enumerate(of_problem) if not size):
            means[problem, cluster] = means[problem, donors[place % len(donors)]] * beside
    targets = torch.nn.functional.normalize(means, dim=-1) if is_unit else means
    return means, targets, targets.square().sum(-1) / 2


def agree_on_means(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], arguments: Arguments) -> None:
    means, targets, halves = (each.double() for each in found)
    torch.testing.assert_close(means, expected[0], atol=1e-5, rtol=1e-5)
    eps = max(torch.finfo(arguments["points"].dtype).eps, 1e-5)
    torch.testing.assert_close(targets, expected[1], atol=1e-6, rtol=2 * eps)
    torch.testing.assert_close(halves, targets.square().sum(-1) / 2, atol=1e-6, rtol=1e-5)
    assert found[1].dtype == arguments["points"].dtype


SIZES = (
    (130, 7, 33, float32),
    (1, 1, 5, bfloat16),
    (63, 65, 128, float16),
    (65, 200, 96, bfloat16),
    (65, 65, 160, float32),
)
# Sizes 2, 0, 5, 0, 5, 0, 0: the empty ones take of 2, 4, 0, then of 2 again.
UNEQUAL = (0, 2, 2, 4, 4, 4, 2, 4, 2, 0, 2, 4)
OPERATIONS = (
    Operation(
        package="gpu_worker.kernels.kmeans",
        function="assign_points",
        exact=scores,
        agree=agree_on_targets,
        strides={"points": 2, "targets": 2, "less": 2},
        cases=(
            *(case(points_and_targets, *size, less=less) for size in SIZES for less in ("none", "half")),
            *(case(points_and_targets, 70, 200, 16, ties="repeated", less=less) for less in ("none", "half")),
            *(case(points_and_targets, 70, 200, 16, ties="zero", less=less) for less in ("none", "ones")),
            case(points_and_targets, 90, 150, 32, less="last only"),
            case(points_and_targets, 0, 3, 8),
        ),
    ),
    Operation(
        package="gpu_worker.kernels.kmeans",
        function="move_centroids",
        exact=moved,
        agree=agree_on_means,
        strides={"points": 2, "ends": 2},
        cases=(
            *(
                case(members, *size, is_unit)
                for size in ((100, 7, 96, bfloat16), (1, 3, 5, float32), (300, 2, 64, float32))
                for is_unit in (False, True)
            ),
            case(members, 12, 7, 8, float32, False, labels=UNEQUAL),
            # Donors are found among more clusters than a tile has.
            case(
                members,
                72,
                71,
                4,
                float32,
                False,
                labels=(*range(1, 70), 68, 5, 68),
                settings={"SIZE_TILE": 16},
            ),
        ),
    ),
)
