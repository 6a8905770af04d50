"""The gated product of rows with NaN beside them, into NaN, against the reference in float32."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.kernels.silu_mul import reference

kernel = pytest.importorskip("gpu_worker.kernels.silu_mul.kernel")

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 63), (2, 1024), (2, 1025), (0, 8), (2, 0)])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, num_rows: int, width: int) -> None:
    torch.manual_seed(width)
    wide = torch.full((num_rows, 2 * width + 3), float("nan"), dtype=dtype)
    wide[:, : 2 * width] = torch.randn(num_rows, 2 * width) * 6
    gate_up = wide.to(device)[:, : 2 * width]
    before = gate_up.clone()
    out = kernel.silu_mul(gate_up)
    # Rounded once: the reference's float32 result.
    expected = reference.silu_mul(gate_up.float()).to(dtype)
    assert (out.dtype, out.shape) == (dtype, expected.shape)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(gate_up, before)
