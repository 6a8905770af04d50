"""Tests of a capture that need no device: what the host may do meanwhile."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.runner.steps.graphs import Captured


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for what PyTorch asks of a device."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock())
    monkeypatch.setattr(torch.cuda, "Event", Mock())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)


def capture(forward: Mock) -> None:
    Captured.of(np.zeros((2, 3), np.int64), torch.device("cpu"), forward, None)


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("error", [None, RuntimeError("void")])
def test_the_garbage_collector_is_off_while_a_step_is_captured(
    is_enabled: bool, error: Exception | None, no_device: None
) -> None:
    seen: list[bool] = []

    def forward(table: Tensor) -> Tensor:
        seen.append(gc.isenabled())
        if error is not None:
            raise error
        return table

    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with nullcontext() if error is None else pytest.raises(RuntimeError):
            capture(Mock(side_effect=forward))
        assert seen == [False]
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
