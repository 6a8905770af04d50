"""Codes of keys, by kernel and reference: the nearest centroid of every part."""

from __future__ import annotations

import pytest
import torch
from kernel_rig import amid_nan
from torch import Tensor

from gpu_worker.policies.pqcache.pq_score import reference

kernel = pytest.importorskip("gpu_worker.policies.pqcache.pq_score.assign_kernel")


def distances(keys: Tensor, codebooks: Tensor) -> Tensor:
    """[..., n, m, ksub]: of every part of a key to every centroid, squared."""
    parts = keys.double().unflatten(-1, (codebooks.shape[-3], codebooks.shape[-1]))
    return (parts[..., None, :] - codebooks.double()[..., None, :, :, :]).square().sum(-1)


@pytest.mark.parametrize(
    ("num_tokens", "parts"),
    [(1, (2, 64, 32)), (65, (1, 2, 5)), (16, (3, 200, 16)), (17, (16, 256, 4)), (65, (1, 100, 128))],
)
def test_of_equally_near_centroids_the_smallest_code_is_taken(
    device: torch.device, num_tokens: int, parts: tuple[int, int, int]
) -> None:
    num_parts, ksub, dsub = parts
    generator = torch.Generator().manual_seed(ksub)
    # Small integers: distances are exact, and equal ones frequent.
    keys = torch.randint(-2, 3, (2, 3, num_tokens, num_parts * dsub), generator=generator).to(device).float()
    codebooks = torch.randint(-1, 2, (2, 3, *parts), generator=generator).to(device).float()
    away = distances(keys, codebooks)
    expected = torch.arange(ksub, device=device).where(away == away.amin(-1, keepdim=True), ksub).amin(-1)
    for module in kernel, reference:
        assert torch.equal(module.pq_assign(keys, codebooks), expected.to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_centroid_is_its_own_code(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    codebooks = torch.randn(2, 100, 24, generator=generator).to(device, dtype).float()
    keys = torch.cat([codebooks[0], codebooks[1]], dim=-1).to(dtype)
    for module in kernel, reference:
        assert module.pq_assign(keys, codebooks).tolist() == [[code, code] for code in range(100)]


@pytest.mark.parametrize(
    ("dtype", "parts"),
    [(torch.float32, (2, 64, 64)), (torch.float16, (3, 40, 32)), (torch.bfloat16, (2, 64, 64))],
)
def test_no_centroid_is_nearer_than_the_one_that_is_chosen(
    device: torch.device, dtype: torch.dtype, parts: tuple[int, int, int]
) -> None:
    width = parts[0] * parts[2]
    generator = torch.Generator().manual_seed(5)
    # K of rows K|V, whose values are NaN; centroids as means are, of more bits than the keys.
    keys = amid_nan((4 * torch.randn(2, 150, width, generator=generator)).to(device, dtype), beside=width)
    codebooks = (4 * torch.randn(2, *parts, generator=generator)).to(device)
    away = distances(keys, codebooks)
    for module in kernel, reference:
        chosen = away.gather(-1, module.pq_assign(keys, codebooks).long()[..., None])[..., 0]
        torch.testing.assert_close(chosen, away.amin(-1), atol=1e-3, rtol=0)


def test_a_codebook_serves_several_rows_of_strided_keys(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    keys = torch.randint(-3, 4, (2, 7, 3, 24), generator=generator).to(device).float().transpose(1, 2)
    codebooks = torch.randint(-3, 4, (3, 2, 9, 12), generator=generator).to(device).float()
    expected = reference.pq_assign(keys, codebooks.expand(2, 3, 2, 9, 12))
    assert torch.equal(kernel.pq_assign(keys, codebooks), expected)
    assert kernel.pq_assign(keys[:, :, :0], codebooks).shape == (2, 3, 0, 2)
