"""Kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import torch

# Triton reads it when it is imported, which any test module may do first through what it imports.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
