"""Selections by score that are particular to the kernel's two launches. All else is in the table of `test_contract`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from operations.selection import TILE, best_of_scores, mixed

from gpu_worker.kernels.top_k import kernel, reference
from gpu_worker.kernels.top_k.finish import finish
from gpu_worker.kernels.top_k.programs import FLOOR, PEAK, SIZE


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
    assert torch.equal(taken.cpu(), best_of_scores(scores, torch.tensor([count]), count))


@pytest.mark.parametrize("num_positions", [100, 2 * TILE + 5])
def test_nan_is_not_a_candidate(num_positions: int, device: torch.device) -> None:
    scores = mixed(num_positions, 4)[None, :1]
    scores[..., ::3] = float("nan")
    scores[..., ::6] *= -1
    counts = torch.tensor([90])
    taken = kernel.top_k(scores.to(device), counts.to(device), 90)
    assert torch.equal(taken.cpu(), best_of_scores(scores, counts, 90))


def test_without_a_width_it_is_the_largest_count(device: torch.device) -> None:
    scores, counts = torch.randn(3, 2, 50, device=device), torch.tensor([3, 1, 2], device=device)
    for module in kernel, reference:
        assert torch.equal(module.top_k(scores, counts), module.top_k(scores, counts, 3))
        assert module.top_k(scores, 0 * counts).shape == (3, 2, 0)


def test_a_selection_wider_than_a_program(device: torch.device) -> None:
    """A fifth of 128K tokens is one."""
    count = kernel.MAX_WIDTH + 1
    scores = torch.randint(0, 5000, (2, 1, count + 899), generator=torch.Generator().manual_seed(3)).float()
    scores[:, :, 5:70:3] = float("-inf")
    counts = torch.tensor([count, 40])
    taken = kernel.top_k(scores.to(device), counts.to(device), count)
    assert torch.equal(taken.cpu(), best_of_scores(scores, counts, count))


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
