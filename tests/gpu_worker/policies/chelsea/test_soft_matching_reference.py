"""What a round of soft matching means, against loops over rows; matching itself: policies/retain/test_chelsea.py."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.policies.chelsea.soft_matching import WeightedRows, merge_rows, num_matches


def merged_by_hand(
    rows: WeightedRows, chunk: int, num_merged: int
) -> list[dict[int, tuple[float, list[int]]]]:
    """Of each head: by row that stays, its degree and the rows of which it is the mean."""
    heads = []
    for keys, degrees in zip(rows.keys.double(), rows.degrees.tolist(), strict=True):
        unit = torch.nn.functional.normalize(keys, dim=-1)
        edges = []
        for source in range(len(keys)):
            begin = source // chunk * chunk
            offered = range(begin + 1, min(begin + chunk, len(keys)), 2)
            if (source - begin) % 2 or not offered:
                continue
            steps = {row: round(4096 * float(unit[source] @ unit[row])) for row in offered}
            target = max(offered, key=lambda row, steps=steps: (steps[row], -row))
            edges.append((steps[target], source, target))
        taken = {source: target for _, source, target in sorted(edges)[len(edges) - num_merged :]}
        stays = {row: (0.0, []) for row in range(len(keys)) if row not in taken}
        for row, degree in enumerate(degrees):
            place = taken.get(row, row)
            stays[place] = stays[place][0] + degree, [*stays[place][1], row]
        heads.append(stays)
    return heads


@pytest.mark.parametrize(("num_rows", "chunk"), [(40, 8), (33, 8), (29, 5), (30, 100)])
@pytest.mark.parametrize("with_ties", [False, True])
def test_a_round_is_what_loops_make_it(num_rows: int, chunk: int, with_ties: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    keys, values = torch.randn(2, 2, num_rows, 16, generator=generator)
    if with_ties:
        keys = (keys > 0) * 2.0 - 1
    positions = torch.arange(num_rows).expand(2, -1) * 3
    rows = WeightedRows(
        positions, torch.randint(1, 9, (2, num_rows), generator=generator).float(), keys, values
    )
    most = num_matches(num_rows, chunk)
    for num_merged in 0, 1, most // 2, most:
        merged = merge_rows(rows, chunk, num_merged)
        for head, expected in enumerate(merged_by_hand(rows, chunk, num_merged)):
            assert merged.positions[head].tolist() == [3 * row for row in expected]
            assert merged.degrees[head].tolist() == [degree for degree, _ in expected.values()]
            for place, (degree, members) in enumerate(expected.values()):
                weights = rows.degrees[head, members, None] / degree
                for of, given in (merged.keys, keys), (merged.values, values):
                    torch.testing.assert_close(of[head, place], (given[head, members] * weights).sum(0))


def test_the_last_round_may_round() -> None:
    keys = torch.randn(1, 20, 16, generator=torch.Generator().manual_seed(0))
    rows = WeightedRows(torch.arange(20)[None], torch.ones(1, 20), keys, keys * 2)
    wide, narrow = merge_rows(rows, 8, 6), merge_rows(rows, 8, 6, torch.bfloat16)
    assert torch.equal(narrow.keys, wide.keys.bfloat16())
    assert torch.equal(narrow.values, wide.values.bfloat16())
    assert torch.equal(narrow.degrees, wide.degrees)
