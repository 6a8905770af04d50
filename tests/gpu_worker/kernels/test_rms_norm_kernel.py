"""Sum and norms of rows with NaN beside them, into NaN, against the reference in float32."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.kernels.rms_norm import reference

kernel = pytest.importorskip("gpu_worker.kernels.rms_norm.kernel")

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    wide = torch.full((num_rows, width + 3), float("nan"), dtype=dtype)
    wide[:, :width] = torch.randn(num_rows, width) * 3
    return wide.to(device)[:, :width]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 63), (2, 64), (5, 65), (2, 2560), (0, 64)])
@pytest.mark.parametrize("has_added", [False, True])
def test_equals_the_reference(
    device: torch.device, dtype: torch.dtype, num_rows: int, width: int, has_added: bool
) -> None:
    torch.manual_seed(width)
    hidden = rows(num_rows, width, dtype, device)
    added = rows(num_rows, width, dtype, device) if has_added else None
    before, weight = hidden.clone(), torch.randn(width).to(device, dtype)
    summed, normed = kernel.rms_norm(hidden, weight, 1e-5, added)
    expected_sum = reference.rms_norm(hidden, weight, 1e-5, added)[0]
    if dtype == torch.bfloat16 and device.type == "cpu":
        # Triton's interpreter cuts off where the GPU rounds.
        torch.testing.assert_close(summed, expected_sum, rtol=2**-7, atol=0)
    else:
        assert torch.equal(summed, expected_sum)
    assert torch.equal(hidden, before)
    assert normed.dtype == dtype
    expected = reference.rms_norm(summed.float(), weight.float(), 1e-5)[1].to(dtype)
    torch.testing.assert_close(normed, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_rows", "width"), [(3, 63), (5, 2560), (0, 64)])
def test_what_is_added_is_normed_first(
    device: torch.device, dtype: torch.dtype, num_rows: int, width: int
) -> None:
    torch.manual_seed(width)
    hidden, added = rows(num_rows, width, dtype, device), rows(num_rows, width, dtype, device)
    before = hidden.clone(), added.clone()
    weight, added_weight = torch.randn(2, width).to(device, dtype)
    summed, normed = kernel.rms_norm(hidden, weight, 1e-5, added, added_weight)
    wide = reference.add_normed(hidden.float(), added.float(), added_weight.float(), 1e-5)
    # Rounded twice: as the norm, and as the sum.
    bound = TOLERANCE[dtype] * ((wide - hidden.float()).abs() + wide.abs() + 1)
    assert ((summed.float() - wide).abs() <= bound).all()
    expected = reference.rms_norm(summed.float(), weight.float(), 1e-5)[1].to(dtype)
    torch.testing.assert_close(normed, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(kernel.add_normed(hidden, added, added_weight, 1e-5), summed)
    assert torch.equal(hidden, before[0])
    assert torch.equal(added, before[1])


def test_small_rows_are_held_up_by_eps(device: torch.device) -> None:
    hidden = torch.full((1, 64), 1e-4, device=device)
    normed = kernel.rms_norm(hidden, torch.ones(64, device=device), 1e-5)[1]
    torch.testing.assert_close(normed, torch.full_like(hidden, 1e-4 / (1e-8 + 1e-5) ** 0.5))
