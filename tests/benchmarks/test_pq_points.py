"""What PQ's training set costs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.commands.hitrate import TEXT
from benchmarks.pq_points import ALL, TRAINERS, Head, main, measure, top_twentieth


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_few_different_keys_are_coded_almost_without_loss(trainer: str) -> None:
    rng = np.random.default_rng(1)
    kinds = rng.standard_normal((32, 8)).astype(np.float32)
    keys = np.concatenate([kinds[rng.permutation(32)] for _ in range(40)])
    head = Head(keys, 9 * rng.standard_normal((3, 2, 8)).astype(np.float32))
    rows = {row.points_per_centroid: row for row in measure([head], 1, (ALL,)) if row.trainer == trainer}
    assert (rows[ALL].tokens, rows[ALL].points) == (1280, 1280)
    # 40 of the same key make the 64 best two kinds, of the second some.
    assert rows[ALL].errors[0] < 0.1
    assert rows[ALL].recalls[0] > 0.8


def test_the_best_twentieth_is_that_of_the_groups_summed_weights() -> None:
    keys = np.zeros((40, 4), np.float32)
    keys[7, 0], keys[9, 1], keys[11, 2] = 4.0, 4.0, 3.0
    head = Head(keys, np.eye(2, 4, dtype=np.float32)[None] * 10)
    assert top_twentieth(head, head.queries[0]).tolist() == [7, 9]


def test_contexts_are_measured_by_themselves_and_together(tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    words = ["--context", "600", "--queries", "8", "--points", "2", "0", "--text", str(TEXT), str(TEXT)]
    assert main([*words, "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    rows = content["rows"]
    assert [(row["tokens"], row["contexts"], row["points"]) for row in rows] == [
        *[(560, 1, 128), (560, 1, 560)] * 2,
        *[(1120, 2, 128), (1120, 2, 1120)] * 2,
    ]
    # Eight layers of two heads.
    assert [len(row["recalls"]) for row in rows] == [32] * 4 + [16] * 4
    for few, all_points in zip(rows[::2], rows[1::2], strict=True):
        assert np.median(all_points["errors"]) < np.median(few["errors"])
        assert np.median(all_points["recalls"]) > np.median(few["recalls"])
    assert str(TEXT.parent) not in content["about"]["command"]
