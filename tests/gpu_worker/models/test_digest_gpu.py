"""On a GPU the digest is the same number: its sums are of integers."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.models.digest import BLOCK_WORDS, digest_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("num", [0, 3, BLOCK_WORDS, 2 * 130 * BLOCK_WORDS + 5])
def test_cuda_equals_cpu(num: int) -> None:
    tensor = torch.randn(num, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    expected = digest_of({"a": tensor})
    on_device = tensor.cuda()
    assert digest_of({"a": on_device}) == expected
    if num:
        on_device[num // 2] += 1
        assert digest_of({"a": on_device}) != expected
