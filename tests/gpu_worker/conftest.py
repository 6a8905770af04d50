"""Kernels run in Triton's interpreter where there is no GPU, and for real where there is one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a kernel's inputs lie."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("needs a CUDA device" if request.param == "cuda" else "the GPU runs the kernels for real")
    return torch.device("cuda" if request.param == "cuda" else "cpu")
