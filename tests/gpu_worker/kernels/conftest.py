"""Kernels run in Triton's interpreter where there is no GPU, and for real where there is one."""

from __future__ import annotations

import os

import pytest
import torch

# Read by Triton when it is imported, so before any test module is.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a kernel's inputs lie."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("needs a CUDA device" if request.param == "cuda" else "the GPU runs the kernels for real")
    return torch.device("cuda" if request.param == "cuda" else "cpu")
