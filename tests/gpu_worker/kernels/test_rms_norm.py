"""Rows to which nothing is added are returned as they are. All else is in the table of `test_contract`."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.kernels.rms_norm import reference

kernel = pytest.importorskip("gpu_worker.kernels.rms_norm.kernel")


def test_rows_to_which_nothing_is_added_are_not_copied(device: torch.device) -> None:
    hidden = torch.ones(3, 64, device=device)
    for module in kernel, reference:
        assert module.rms_norm(hidden, hidden[0], 1e-3)[0] is hidden
