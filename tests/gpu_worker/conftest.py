"""Kernels run in Triton's interpreter where there is no GPU, and for real where there is one."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    from quick_interpreter import hasten

    hasten()


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has written yet holds NaN, or a number out of any range, that would be seen."""
    empty = torch.empty

    def poisoned(*shape: object, **options: object) -> Tensor:
        made = empty(*shape, **options)  # type: ignore[call-overload]
        if made.is_floating_point():
            return made.fill_(math.nan)
        return made.fill_(True if made.dtype is torch.bool else min(0x7ABCDEF, torch.iinfo(made.dtype).max))

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, poisoned_memory: None) -> torch.device:
    """Where a kernel's inputs lie."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("needs a CUDA device" if request.param == "cuda" else "the GPU runs the kernels for real")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture(params=[1, 2, 132])
def num_processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """For the test module's `kernel`: one split of all tiles, two of unequal length, a split for each tile."""
    monkeypatch.setattr(request.module.kernel, "num_processors", lambda _device: request.param)
    return request.param
