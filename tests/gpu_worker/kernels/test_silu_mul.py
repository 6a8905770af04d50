"""The gated product of rows with NaN beside them, into NaN, against the formula in double precision."""

from __future__ import annotations

import pytest
import torch
from kernel_rig import amid_nan, assert_rounded

from gpu_worker.kernels.silu_mul import reference

kernel = pytest.importorskip("gpu_worker.kernels.silu_mul.kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (2, 1024), (3, 1025), (0, 8), (2, 0)])
def test_gate_opens_for_up(device: torch.device, dtype: torch.dtype, num_rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    gate_up = amid_nan(6 * torch.randn(num_rows, 2 * width, generator=generator).to(device, dtype))
    before = gate_up.clone()
    gate, up = gate_up.double().split((width, width), dim=1)
    exact = (gate / (1 + (-gate).exp()) * up).float()
    assert_rounded(kernel.silu_mul(gate_up), exact, dtype)
    assert_rounded(reference.silu_mul(gate_up.float()), exact, torch.float32)
    assert reference.silu_mul(gate_up).dtype == dtype
    assert torch.equal(gate_up, before)
