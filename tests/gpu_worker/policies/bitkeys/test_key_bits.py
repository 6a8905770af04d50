"""The rotation of keys before they are coded. The kernels are in the table of `test_contract`."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.policies.bitkeys.rotation import Rotation


@pytest.mark.parametrize("head_dim", [1, 8, 80, 96, 128])
def test_a_rotation_keeps_products_and_spreads_a_channel(head_dim: int) -> None:
    matrix = Rotation.of(head_dim, torch.device("cpu")).matrix
    product = matrix.double() @ matrix.double().T
    torch.testing.assert_close(product, torch.eye(head_dim, dtype=torch.float64), atol=2e-3, rtol=0)
    assert torch.equal(matrix, Rotation.of(head_dim, torch.device("cpu")).matrix)
    assert matrix.abs().max() <= 5 / head_dim**0.5
