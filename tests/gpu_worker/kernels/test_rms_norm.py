"""Sum and norms of rows with NaN beside them, into NaN, against the formula in double precision."""

from __future__ import annotations

import pytest
import torch
from kernel_rig import amid_nan, assert_rounded
from torch import Tensor

from gpu_worker.kernels.rms_norm import reference

kernel = pytest.importorskip("gpu_worker.kernels.rms_norm.kernel")

# So large that small rows are held up by it.
EPS = 1e-3


def norm(rows: Tensor, weight: Tensor) -> Tensor:
    wide = rows.double()
    return wide / (wide.square().mean(dim=1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (2, 64), (5, 65), (2, 2560), (0, 64)])
@pytest.mark.parametrize("adds", ["nothing", "rows", "normed rows"])
def test_the_sum_is_normed(
    device: torch.device, dtype: torch.dtype, num_rows: int, width: int, adds: str
) -> None:
    generator = torch.Generator().manual_seed(width)
    hidden, added = (
        amid_nan(3 * torch.randn(num_rows, width, generator=generator).to(device, dtype)) for _ in range(2)
    )
    hidden[:1] *= 0.01
    before = hidden.clone(), added.clone()
    weight, added_weight = torch.randn(2, width, generator=generator).to(device, dtype)
    addend = torch.zeros_like(hidden.double())
    if adds != "nothing":
        addend = added.double() if adds == "rows" else norm(added, added_weight)
    arguments = {"nothing": (), "rows": (added,), "normed rows": (added, added_weight)}[adds]
    for module in kernel, reference:
        summed, normed = module.rms_norm(hidden, weight, EPS, *arguments)
        # Rounded twice: as the norm, and as the sum.
        bound = max(torch.finfo(dtype).eps, 1e-6) * (addend.abs() + (hidden + addend).abs()) + 1e-6
        assert summed.dtype == dtype
        assert ((summed - (hidden + addend)).abs() <= bound).all()
        assert_rounded(normed, norm(summed, weight).float(), dtype)
        if adds == "normed rows":
            # Compiled without the second norm it may add in another order.
            alone = module.add_normed(hidden, added, added_weight, EPS)
            assert ((alone - (hidden + addend)).abs() <= bound).all()
        if adds == "nothing":
            assert summed is hidden
    assert torch.equal(hidden, before[0])
    assert torch.equal(added, before[1])


def test_16_bit_squares_are_summed_in_float32(device: torch.device) -> None:
    hidden = torch.full((1, 4096), 300.0, dtype=torch.float16, device=device)
    for module in kernel, reference:
        assert torch.equal(
            module.rms_norm(hidden, torch.ones_like(hidden[0]), 0.0)[1], torch.ones_like(hidden)
        )
