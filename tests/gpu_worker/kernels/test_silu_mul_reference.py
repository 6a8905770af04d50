"""The gated product against the formula in double precision."""

from __future__ import annotations

import math

import torch

from gpu_worker.kernels.silu_mul import silu_mul


def test_gate_opens_for_up() -> None:
    gate_up = 6 * torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    before = gate_up.clone()
    out = silu_mul(gate_up)
    expected = [
        [g / (1 + math.exp(-g)) * u for g, u in zip(row[:5], row[5:], strict=True)]
        for row in gate_up.tolist()
    ]
    torch.testing.assert_close(out, torch.tensor(expected))
    assert torch.equal(gate_up, before)


def test_the_type_stays() -> None:
    gate_up = torch.randn(2, 8).bfloat16()
    out = silu_mul(gate_up)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), silu_mul(gate_up.float()), atol=1e-6, rtol=2**-6)
