"""Coding of what leaves the window, against the assignment of one key at a time."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.policies.pqcache.pq_append import pq_append


@pytest.mark.parametrize(("num_parts", "ksub"), [(2, 8), (3, 20)])
def test_codes_are_the_nearest_centroids_and_nothing_else_changes(num_parts: int, ksub: int) -> None:
    generator = torch.Generator().manual_seed(ksub)
    keys = torch.randn(3, 2, 4, 2 * num_parts * 5, generator=generator)[..., ::2]
    books = torch.randn(5, 2, 4, num_parts, ksub, 5, generator=generator)
    codes = torch.full((5, 2, 4, 30, num_parts), 255, dtype=torch.uint8)
    counts = torch.full((5, 2, 4, ksub * ksub), 7, dtype=torch.int32) if num_parts == 2 else None
    pq_append(keys.contiguous(), books, codes, counts, torch.tensor([4, 0, 2]), torch.tensor([29, -1, 3]))
    for row, seat, position in (0, 4, 29), (2, 2, 3):
        for layer in range(2):
            for head in range(4):
                found = []
                for part in range(num_parts):
                    key = keys[row, layer, head, 5 * part : 5 * part + 5]
                    found.append(
                        int((books[seat, layer, head, part] - key).double().square().sum(-1).argmin())
                    )
                assert codes[seat, layer, head, position].tolist() == found
                codes[seat, layer, head, position] = 255
                if counts is not None:
                    assert int(counts[seat, layer, head, found[0] * ksub + found[1]]) == 8
                    counts[seat, layer, head, found[0] * ksub + found[1]] = 7
    assert (codes == 255).all()
    assert counts is None or bool((counts == 7).all())


def test_a_tie_takes_the_smallest_code() -> None:
    books = torch.tensor([[9.0], [2.0], [3.0], [2.0]]).expand(1, 1, 1, 2, 4, 1)
    codes, counts = torch.zeros(1, 1, 1, 1, 2, dtype=torch.uint8), torch.zeros(1, 1, 1, 16, dtype=torch.int32)
    zero = torch.tensor([0])
    pq_append(torch.tensor([[[[2.5, 2.0]]]]), books, codes, counts, zero, zero)
    assert codes.flatten().tolist() == [1, 1]
    assert counts.flatten().tolist() == [0] * 5 + [1] + [0] * 10


def test_only_pairs_are_counted() -> None:
    zero = torch.tensor([0])
    with pytest.raises(ValueError, match="3 parts"):
        pq_append(
            torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 1, 3, 4, 1), torch.zeros(1, 1, 1, 1, 3, dtype=torch.uint8),
            torch.zeros(1, 1, 1, 16, dtype=torch.int32), zero, zero,
        )  # fmt: skip
