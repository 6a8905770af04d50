"""The code assignment kernel against its reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gpu_worker.policies.pqcache.pq_score import reference
from gpu_worker.policies.pqcache.pq_score.assign_kernel import pq_assign


@pytest.mark.parametrize("num_tokens", [1, 65])
@pytest.mark.parametrize("parts", [(2, 64, 32), (1, 2, 5), (3, 200, 16), (16, 256, 4), (1, 100, 128)])
def test_codes_and_their_ties_are_those_of_the_reference(
    device: torch.device, num_tokens: int, parts: tuple[int, int, int]
) -> None:
    num_parts, ksub, dsub = parts
    generator = torch.Generator().manual_seed(ksub)
    # Small integers: distances are exact, and equal ones frequent.
    keys = torch.randint(-2, 3, (2, 3, num_tokens, num_parts * dsub), generator=generator).to(device).float()
    codebooks = torch.randint(-1, 2, (2, 3, *parts), generator=generator).to(device).float()
    codes = pq_assign(keys, codebooks)
    assert codes.dtype == torch.uint8
    assert torch.equal(codes, reference.pq_assign(keys, codebooks))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_centroid_is_its_own_code(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    codebooks = torch.randn(2, 100, 24, generator=generator).to(device, dtype).float()
    keys = torch.cat([codebooks[0], codebooks[1]], dim=-1).to(dtype)
    assert pq_assign(keys, codebooks).tolist() == [[code, code] for code in range(100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parts", [(2, 64, 64), (3, 40, 32)])
def test_no_centroid_is_nearer_than_the_one_that_is_chosen(
    device: torch.device, dtype: torch.dtype, parts: tuple[int, int, int]
) -> None:
    num_parts, _, dsub = parts
    generator = torch.Generator().manual_seed(5)
    # K of rows K|V, whose values are NaN; centroids as means are, of more bits than the keys.
    rows = torch.full((2, 300, 2 * num_parts * dsub), float("nan"))
    rows[..., : num_parts * dsub] = 4 * torch.randn(2, 300, num_parts * dsub, generator=generator)
    keys = rows.to(device, dtype)[..., : num_parts * dsub]
    codebooks = (4 * torch.randn(2, *parts, generator=generator)).to(device)
    codes = pq_assign(keys, codebooks).long()
    vectors = keys.double().unflatten(-1, (num_parts, dsub)).transpose(1, 2)
    distances = (vectors[..., None, :] - codebooks.double()[:, :, None]).square().sum(-1)
    chosen = distances.gather(-1, codes.transpose(1, 2)[..., None])[..., 0]
    torch.testing.assert_close(chosen, distances.amin(-1), atol=1e-3, rtol=0)


def test_a_codebook_serves_several_rows_of_strided_keys(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    keys = torch.randint(-3, 4, (2, 7, 3, 24), generator=generator).to(device).float().transpose(1, 2)
    codebooks = torch.randint(-3, 4, (3, 2, 9, 12), generator=generator).to(device).float()
    assert torch.equal(
        pq_assign(keys, codebooks), reference.pq_assign(keys, codebooks.expand(2, 3, 2, 9, 12))
    )
    assert pq_assign(keys[:, :, :0], codebooks).shape == (2, 3, 0, 2)
