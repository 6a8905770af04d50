"""Selection by score, in Triton and by its definition, against sorting in plain Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_worker.kernels.top_k import kernel, reference
from gpu_worker.kernels.top_k.finish import finish
from gpu_worker.kernels.top_k.programs import FLOOR, PEAK, SIZE

MINUS_INF = float("-inf")
# Rows of up to this many scores take one launch, where no more than half as many are asked for.
TILE = 2048


def best(scores: list[float], count: int, width: int) -> list[int]:
    """Of equals the higher position."""
    candidates = [(score, position) for position, score in enumerate(scores) if score > MINUS_INF]
    taken = sorted(position for _, position in sorted(candidates, reverse=True)[:count])
    return taken + [-1] * (width - len(taken))


def check(scores: Tensor, counts: list[int], device: torch.device) -> None:
    width = max(counts)
    expected = [
        [best(head.tolist(), count, width) for head in row] for row, count in zip(scores, counts, strict=True)
    ]
    for module in kernel, reference:
        taken = module.top_k(scores.to(device), torch.tensor(counts, device=device), width)
        assert taken.dtype == torch.int64
        assert taken.tolist() == expected


def random_rows(num_positions: int, seed: int) -> Tensor:
    """Six rows [3, 2, N]: distinct scores; ties; all equal; few candidates; all -inf; half -inf, the rest ties."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(6, num_positions, generator=generator)
    rows[1] = (rows[1] * 2).round()
    rows[2] = -3.0
    rows[3, torch.rand(num_positions, generator=generator) < 0.98] = MINUS_INF
    rows[4] = MINUS_INF
    rows[5] = rows[5].round()
    rows[5, torch.rand(num_positions, generator=generator) < 0.5] = MINUS_INF
    return rows.view(3, 2, num_positions)


@pytest.mark.parametrize(
    ("num_positions", "counts"),
    [
        (1, [1, 0, 900]),
        (65, [7, 300, 64]),
        (TILE - 1, [1, 0, 900]),
        (TILE, [7, 300, 64]),
        (TILE + 1, [1, 0, 900]),
        (3 * TILE + 13, [7, 300, 64]),
    ],
    ids=str,
)
def test_selection_is_that_of_the_definition(
    num_positions: int, counts: list[int], device: torch.device
) -> None:
    check(random_rows(num_positions, seed=num_positions), counts, device)


def test_wide_selections(device: torch.device) -> None:
    check(random_rows(9000, seed=1)[:1, :1], [1025], device)
    check(random_rows(9000, seed=2)[:1], [4096], device)
    check(random_rows(4200, seed=3)[:2], [5000, 4199], device)


@pytest.mark.parametrize(("num_values", "num_columns"), [(3, 1200), (100_000, 700)])
def test_scores_that_follow_their_columns(num_values: int, num_columns: int, device: torch.device) -> None:
    # Fewer columns than asked for hold all good scores, so that what is listed outgrows a tile.
    generator = torch.Generator().manual_seed(num_values)
    scores = torch.randint(0, num_values, (1, 2, 6 * TILE), generator=generator).float()
    good = torch.arange(6 * TILE) % TILE < torch.tensor([[num_columns], [num_columns // 2]])
    check(scores + good * 1e6, [1000], device)


def test_best_scores_that_follow_the_columns_of_the_list(device: torch.device) -> None:
    # 900 good columns: of what is listed, the best lie in 400 of its own columns.
    scores = torch.rand(1, 1, 14 * TILE, generator=torch.Generator().manual_seed(0))
    good = (torch.arange(14 * TILE) % TILE < 900).nonzero()[:, 0]
    scores[0, 0, good] += 10
    scores[0, 0, good[torch.arange(len(good)) % TILE < 400]] += 10
    check(scores, [1000], device)


def test_good_scores_in_one_place(device: torch.device) -> None:
    scores = torch.randn(1, 2, 5 * TILE, generator=torch.Generator().manual_seed(0))
    scores[0, 0, 3 * TILE - 100 : 3 * TILE + 1000] += 50
    scores[0, 1, -1000:] = 50.0
    check(scores, [950], device)


def test_good_scores_in_one_chunk_of_many(device: torch.device) -> None:
    scores = torch.randn(1, 1, 14 * TILE, generator=torch.Generator().manual_seed(0))
    scores[0, 0, 5 * TILE + 7 : 5 * TILE + 1007] += 50
    check(scores, [950], device)


def test_chunks_of_several_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # As many rows have it.
    monkeypatch.setattr("gpu_worker.kernels.top_k.kernel._chunk_tiles", lambda rows, num_tiles: 2)
    scores = torch.randn(1, 3, 4 * TILE + 300, generator=torch.Generator().manual_seed(0))
    scores[0, 1] = scores[0, 1].mul_(4).round()
    scores[0, 2, 2000:2900] += 50
    check(scores, [700], device)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]], ids=str)
def test_chunks_may_be_listed_in_any_order(order: list[int], device: torch.device) -> None:
    # Each program of `prune` takes the next place of the short list; here it is made by hand.
    scores = torch.randn(1, 1, 3 * TILE, generator=torch.Generator().manual_seed(0)).mul_(20).round_()
    floor, count = 20.0, 500
    chunks = [(scores[0, 0, c * TILE : (c + 1) * TILE] > floor).nonzero()[:, 0] + c * TILE for c in range(3)]
    sizes = [len(chunk) for chunk in chunks]
    places = [sum(sizes[c] for c in order[: order.index(chunk)]) for chunk in range(3)]
    listed = torch.cat([chunks[c] for c in order])
    bits = scores.view(torch.int32)
    peak = int(bits.max())
    notes = {
        FLOOR.value: int(torch.tensor(floor).view(torch.int32)),
        PEAK.value: peak,
        SIZE.value: sum(sizes),
    }

    def row(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    short_positions = torch.zeros(TILE, dtype=torch.int32)
    short_positions[: len(listed)] = listed
    short_keys = bits[0, 0, short_positions.long()]
    taken = torch.empty(1, 1, count, dtype=torch.int64, device=device)
    finish[(1, 3)](
        bits.to(device), torch.tensor([count], device=device), row(*(notes[n] for n in range(3))),
        row(*sizes), row(0, 0, 0), row(*places), row(0), short_keys.to(device), short_positions.to(device), taken,
        1, 3 * TILE, count, 3 * TILE, 3 * TILE, 3, TILE, CHUNKS=4, TILE=TILE, SLAB=256,
    )  # fmt: skip
    assert taken[0, 0].tolist() == best(scores[0, 0].tolist(), count, count)


@pytest.mark.parametrize("num_positions", [TILE, 2 * TILE + 5])
def test_ties_go_to_the_higher_position(num_positions: int, device: torch.device) -> None:
    scores = torch.zeros(1, 1, num_positions)
    scores[..., 1::2] = -0.0
    check(scores, [900], device)
    # The one above the ties comes first, and one tie less is taken.
    scores[..., 3] = 1.0
    check(scores, [900], device)


@pytest.mark.parametrize("num_positions", [TILE, 2 * TILE + 5])
def test_extreme_scores_are_kept_apart(num_positions: int, device: torch.device) -> None:
    limits = torch.finfo(torch.float32)
    values = [
        limits.min,
        -1.0,
        -limits.tiny,
        -1e-45,
        -0.0,
        0.0,
        1e-45,
        3e-45,
        limits.tiny,
        limits.max,
        float("inf"),
    ]
    scores = torch.full((1, 1, num_positions), MINUS_INF)
    places = torch.randperm(num_positions, generator=torch.Generator().manual_seed(1))[: len(values)]
    scores[0, 0, places] = torch.tensor(values)
    for count in (4, 6, 9, 12):
        check(scores, [count], device)


@pytest.mark.parametrize("num_positions", [100, 2 * TILE + 5])
def test_nan_is_no_candidate(num_positions: int, device: torch.device) -> None:
    scores = random_rows(num_positions, seed=4)[:1, :1]
    scores[..., ::3] = float("nan")
    scores[..., ::6] *= -1
    taken = kernel.top_k(scores.to(device), torch.tensor([90], device=device), 90)
    assert taken[0, 0].tolist() == best(scores[0, 0].tolist(), 90, 90)


@pytest.mark.parametrize("num_positions", [100, TILE + 5])
def test_scores_may_be_a_view(num_positions: int, device: torch.device) -> None:
    room = torch.full((3, 3, num_positions + 9), float("inf"), device=device)
    view = room[::2, 1:2, 4 : 4 + num_positions]
    view.copy_(random_rows(num_positions, seed=5)[:1].transpose(0, 1))
    counts = torch.tensor([[60, 1], [80, 1]], device=device)[:, 0]
    across = torch.stack([view, view], dim=-1)[..., 0]
    expected = reference.top_k(view, counts, 80)
    for scores in view, across:
        assert torch.equal(kernel.top_k(scores, counts, 80), expected)


def test_width(device: torch.device) -> None:
    scores, counts = random_rows(50, seed=6).to(device), torch.tensor([3, 1, 2], device=device)
    for module in kernel, reference:
        wider = module.top_k(scores, counts, 70)
        assert torch.equal(wider[..., :3], module.top_k(scores, counts))
        assert (wider[..., 3:] == -1).all()
    with pytest.raises(ValueError, match="float64"):
        kernel.top_k(scores.double(), counts, 3)


def test_a_selection_wider_than_a_program(device: torch.device) -> None:
    """A fifth of 128K tokens is one."""
    count = kernel.MAX_WIDTH + 1
    scores = torch.randint(0, 5000, (2, 1, count + 899), generator=torch.Generator().manual_seed(3)).float()
    scores[:, :, 5:70:3] = MINUS_INF
    check(scores, [count, 40], device)


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (2, 2, 0), (2, 2, 5)], ids=str)
def test_nothing_to_take(shape: tuple[int, int, int], device: torch.device) -> None:
    counts = torch.zeros(shape[0], dtype=torch.int64, device=device)
    for module in kernel, reference:
        assert module.top_k(torch.zeros(shape, device=device), counts).shape == (*shape[:2], 0)
        taken = module.top_k(torch.zeros(shape, device=device), counts, 4)
        assert taken.shape == (*shape[:2], 4)
        assert (taken == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "num_positions", "width"),
    [
        (8, 131072, 2048),
        (48, 131072, 2048),
        (192, 32768, 2048),
        (1, 1_000_003, 2048),
        (8, 131072, 26214),
        (16, 1 << 20, 200_000),
    ],
)
def test_replay_of_a_graph_follows_its_inputs(rows: int, num_positions: int, width: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    scores = torch.zeros(1, rows, num_positions, device="cuda")
    counts = torch.tensor([1], device="cuda")
    kernel.top_k(scores, counts, width)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taken = kernel.top_k(scores, counts, width)
    for num_values, count in [(1 << 24, width), (1000, width - 48), (1, width), (1 << 24, 0)]:
        scores.copy_(torch.randint(0, num_values, scores.shape, generator=generator, device="cuda"))
        counts.fill_(count)
        graph.replay()
        assert torch.equal(taken, reference.top_k(scores, counts, width))
