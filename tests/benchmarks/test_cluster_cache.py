"""ClusterKV's own cache: hits counted by hand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.hitrate.cluster_cache import cluster_cache_hits

LABELS = [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
# At the second step cluster 0 is trimmed: token 2 is left out.
STEPS = [[0, 1, 2], [0, 1, 3], [3, 4, 6], [0, 1, 2]]


@pytest.mark.parametrize(
    ("depth", "tokens", "clusters", "held"),
    [
        (1, [0, 2 / 3, 1 / 3, 0], [0, 1 / 2, 1 / 2, 0], 3),
        # The last step finds its cluster, of which one token was not brought when it was selected last.
        (2, [0, 2 / 3, 1 / 3, 2 / 3], [0, 1 / 2, 1 / 2, 1], 5),
        (3, [0, 2 / 3, 1 / 3, 1], [0, 1 / 2, 1 / 2, 1], 6),
    ],
)
def test_what_the_last_steps_selected_hits(
    depth: int, tokens: list[float], clusters: list[float], held: float
) -> None:
    positions = torch.tensor(STEPS, dtype=torch.int32).view(4, 1, 1, 1, 3)
    hits = cluster_cache_hits(positions, torch.tensor(LABELS, dtype=torch.int32).view(1, 1, 1, 10), depth)
    assert hits.tokens.tolist() == pytest.approx(tokens)
    assert hits.clusters is not None
    assert hits.clusters.tolist() == pytest.approx(clusters)
    assert hits.held_tokens == held


def test_each_layer_sequence_and_head_has_a_cache_of_its_own() -> None:
    """Where one head goes from cluster to cluster, the other seven keep to theirs."""
    same = torch.tensor([[6, 7, 8]] * 4)
    positions = same[:, None].repeat(1, 8, 1)
    positions[:, 5] = torch.tensor(STEPS)
    labels = torch.tensor(LABELS, dtype=torch.int32).repeat(8, 1).view(2, 2, 2, 10)
    hits = cluster_cache_hits(positions.int().view(4, 2, 2, 2, 3), labels, 1)
    assert hits.tokens.tolist() == pytest.approx([0, (7 + 2 / 3) / 8, (7 + 1 / 3) / 8, 7 / 8])
    assert hits.clusters is not None
    assert hits.clusters.tolist() == pytest.approx([0, 7.5 / 8, 7.5 / 8, 7 / 8])
    assert hits.held_tokens == 3
