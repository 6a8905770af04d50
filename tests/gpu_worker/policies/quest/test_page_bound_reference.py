"""Quest's page score against a plain loop, and as a bound."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.policies.quest.page_bound import page_bound

ONLY = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_the_score_sums_the_larger_product_of_every_channel_and_head(group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    query = torch.randn(2, 2 * group, 5, generator=generator)
    pages = torch.randn(2, 2, 6, 4, 5, generator=generator)
    key_min, key_max = pages.amin(dim=3), pages.amax(dim=3)
    spans = [(1, 6), (0, 4)]
    for b, (first, last) in enumerate(spans):
        # Outside the candidates lies what an earlier request left.
        key_min[b, :, :first], key_max[b, :, last:] = float("nan"), float("nan")
    begin, end = torch.tensor(spans).T
    # The first row has the second seat.
    seats = torch.tensor([1, 0])
    scores = page_bound(query, key_min[seats], key_max[seats], seats, begin, end, 6)
    assert scores.dtype == torch.float32
    for b, (first, last) in enumerate(spans):
        for kv_head in range(2):
            for page in range(6):
                if not first <= page < last:
                    assert scores[b, kv_head, page] == float("-inf")
                    continue
                expected = 0.0
                for head in range(kv_head * group, (kv_head + 1) * group):
                    for q, least, largest in zip(
                        query[b, head].tolist(),
                        key_min[b, kv_head, page].tolist(),
                        key_max[b, kv_head, page].tolist(),
                        strict=True,
                    ):
                        expected += max(q * least, q * largest)
                assert float(scores[b, kv_head, page]) == pytest.approx(expected, abs=1e-5)


def test_no_key_of_a_page_exceeds_its_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 16, generator=generator)
    pages = torch.randn(1, 2, 8, 4, 16, generator=generator)
    scores = page_bound(query, pages.amin(3), pages.amax(3), ONLY, ONLY, torch.tensor([8]), 8)
    products = torch.einsum("bhd,bhptd->bhpt", query, pages)
    assert (products <= scores[..., None] + 1e-5).all()
    # A page of one key is its own bound.
    single = page_bound(query, pages[..., 0, :], pages[..., 0, :], ONLY, ONLY, torch.tensor([8]), 8)
    torch.testing.assert_close(single, products[..., 0])


def test_16_bit_extremes_are_summed_in_float32() -> None:
    query = torch.ones(1, 1, 128, dtype=torch.bfloat16)
    ones = torch.ones(1, 1, 1, 128, dtype=torch.bfloat16)
    ones[..., 1:] = 2**-8
    scores = page_bound(query, -ones, ones, ONLY, ONLY, torch.tensor([1]), 1)
    assert scores.tolist() == [[[1 + 127 * 2**-8]]]
