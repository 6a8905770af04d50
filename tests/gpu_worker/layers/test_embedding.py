"""Logits are as fine as their sums: what differs less than a step of 16 bits is no tie."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.layers.embedding import project_logits


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 24])
def test_close_logits_are_no_ties(device: str, dtype: torch.dtype, num_rows: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    hidden = torch.ones(num_rows, 64, dtype=dtype, device=device)
    weight = torch.zeros(1000, 64, dtype=dtype, device=device)
    weight[:, 0] = 25
    # Less than half a step of bfloat16, and of float16, at 25.
    weight[7, 1] = 2**-8
    logits = project_logits(hidden, weight)
    assert logits.dtype == torch.float32
    assert logits.argmax(-1).tolist() == [7] * num_rows
