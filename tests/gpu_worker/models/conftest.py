"""Kernels run in Triton's interpreter where there is no GPU, as in the kernels' own tests."""

from __future__ import annotations

import os

import torch

# Read by Triton when it is imported, so before any test module is.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
