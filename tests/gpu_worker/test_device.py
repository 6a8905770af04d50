"""A side stream runs after the work queued before it, and before what waits for it; in captured graphs too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_worker.device import SideStream

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
SLOW = 20_000_000


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_layers_in_turn_fork_and_join(device: torch.device, is_first: bool) -> None:
    beside, start = SideStream(device, is_first), torch.ones(1000, device=device)
    assert torch.equal(layers(beside, start), torch.full_like(start, 31))
    if device.type == "cpu":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = layers(beside, start)
    for number in (3.0, 5.0):
        start.fill_(number)
        graph.replay()
        assert torch.equal(result, torch.full_like(start, 16 * number + 15))


def layers(beside: SideStream, hidden: Tensor) -> Tensor:
    """Four times 2x + 1, of which the doubling is beside, and the slower of both is now this and now that."""
    for layer in range(4):
        doubled = torch.empty_like(hidden)
        with beside.queue():
            idle(hidden.device, layer % 2 == 0)
            torch.add(hidden, hidden, out=doubled)
        idle(hidden.device, layer % 2 == 1)
        beside.join()
        hidden = doubled + 1
    return hidden


def idle(device: torch.device, is_slow: bool) -> None:
    if device.type == "cuda" and is_slow:
        torch.cuda._sleep(SLOW)
