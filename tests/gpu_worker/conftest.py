"""Kernels run in Triton's interpreter where there is no GPU, and for real where there is one."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    from quick_interpreter import hasten

    hasten()


# Elements around fresh memory, as many as a vector has and a multiple of any.
GUARD = 64


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory, and what lies around it, holds NaN or a number out of any range: reads of it are seen, and at the
    end of the test so are writes around it."""
    empty, guarded = torch.empty, []

    def poisoned(*shape: object, **options: object) -> Tensor:
        made = empty(*shape, **options)  # type: ignore[call-overload]
        if made.is_floating_point():
            poison = math.nan
        else:
            poison = True if made.dtype is torch.bool else min(0x7ABCDEF, torch.iinfo(made.dtype).max)
        if not made.numel() or made.is_meta:
            return made
        memory = empty(made.numel() + 2 * GUARD, dtype=made.dtype, device=made.device).fill_(poison)
        guarded.append((memory, poison))
        return memory[GUARD:-GUARD].view(made.shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield
    for memory, poison in guarded:
        around = torch.cat([memory[:GUARD], memory[-GUARD:]])
        assert (around.isnan() if poison != poison else around == poison).all(), (
            "memory around an output was written"
        )


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
