"""InfiniGen: partial keys after skewing, scored by the query foretold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from policy_index import SHAPE, Tokens, candidates_of, grow, new_index, queries_of, select
from safetensors.torch import save_file
from torch import Tensor

from gpu_worker.errors import ConfigError
from gpu_worker.policies.infinigen.policy import InfiniGen, skew

POLICY = InfiniGen(ratio=0.5)
HEADS, DIM = SHAPE.num_kv_heads, SHAPE.head_dim


@pytest.mark.parametrize("group", [1, 3, 4])
def test_skewing_keeps_inner_products(group: int) -> None:
    tokens = Tokens.random(60, group, replace(SHAPE, group_size=group))
    queries, keys = tokens.queries[0].double(), tokens.keys[0].double()
    matrix = skew(tokens.queries[0], tokens.keys[0]).double()
    for head in range(HEADS * group):
        kv_head = head // group
        skewed = (queries[head] @ matrix[kv_head]) @ (keys[kv_head] @ matrix[kv_head]).T
        torch.testing.assert_close(skewed, queries[head] @ keys[kv_head].T, atol=1e-4, rtol=1e-4)


def turned(seed: int) -> Tensor:
    """A random orthogonal matrix [d, d]."""
    return torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(seed))).Q


def test_skewing_finds_the_few_directions_of_the_queries_the_weightiest_first() -> None:
    # Queries span two hidden directions; along the shorter one keys are far longer.
    hidden, generator = turned(0), torch.Generator().manual_seed(0)
    queries = torch.zeros(HEADS * 3, 50, DIM)
    queries[..., 0] = 3 * torch.randn(HEADS * 3, 50, generator=generator)
    queries[..., 1] = torch.randn(HEADS * 3, 50, generator=generator)
    keys = torch.randn(HEADS, 50, DIM, generator=generator)
    keys[..., 1] *= 30
    matrix = skew(queries @ hidden.T, keys @ hidden.T)
    for head in range(HEADS):
        along = (hidden.T @ matrix[head]).abs()
        assert along[1, 0] > 0.99
        assert along[0, 1] > 0.99


@pytest.mark.parametrize("group", [1, 3, 4])
def test_with_every_column_the_best_by_weight_are_taken(group: int) -> None:
    policy, shape = InfiniGen(ratio=1.0), replace(SHAPE, group_size=group)
    index, tokens = new_index(policy, shape), Tokens.random(80, group, shape)
    span = grow(policy, index, 2, tokens, policy.plan(60, 20))
    assert span == (0, 80)
    query = torch.randn(1, HEADS * group, DIM, generator=torch.Generator().manual_seed(group))
    scores = policy.score(index, candidates_of(query, {2: span}, layer=1, extra=7))
    assert (scores[..., 80:] == float("-inf")).all()
    for head in range(HEADS):
        heads, keys = query[0, head * group : (head + 1) * group], tokens.keys[1, head]
        weights = (heads @ keys.T * SHAPE.scale).softmax(dim=-1).sum(dim=0)
        torch.testing.assert_close(scores[0, head, :80], weights, atol=2e-3, rtol=2e-2)
        best = sorted(weights.topk(5).indices.tolist())
        assert select(policy, index, query, {2: span}, layer=1, k=5)[0][head] == best


def test_few_columns_are_enough_where_queries_have_few_directions() -> None:
    """The columns' choice and the skew together: neither plain columns nor the last ones would do."""
    policy, hidden = InfiniGen(ratio=0.25), turned(3)
    index, tokens = new_index(policy), Tokens.random(90, 1)
    flat = torch.zeros_like(tokens.queries)
    flat[..., 2], flat[..., 5] = tokens.queries[..., 2], 2 * tokens.queries[..., 5]
    tokens = Tokens(tokens.keys, flat @ hidden.T)
    span = grow(policy, index, 0, tokens, policy.plan(70, 20))
    assert index.keys.shape[-1] == 2
    query = tokens.queries[1, :, 80]
    scores = policy.score(index, candidates_of(query[None], {0: span}, layer=1))
    weights = (query.view(HEADS, 2, DIM) @ tokens.keys[1].mT * SHAPE.scale).softmax(dim=-1).sum(dim=1)
    torch.testing.assert_close(scores[0], weights, atol=2e-3, rtol=2e-2)


def test_it_scores_with_the_early_query() -> None:
    index, tokens = new_index(POLICY), Tokens.random(60, 0)
    span = grow(POLICY, index, 0, tokens, POLICY.plan(60, 20))
    given = candidates_of(torch.randn(1, 2 * HEADS, DIM), {0: span}, layer=0)
    scores = POLICY.score(index, given)
    other = queries_of(given.query + 5, early=given.query)
    assert torch.equal(POLICY.score(index, replace(given, queries=other)), scores)


def test_keys_that_leave_the_window_are_coded_as_the_prompts_are() -> None:
    index, tokens = new_index(POLICY), Tokens.random(100, 0)
    _, end = grow(POLICY, index, 1, tokens, POLICY.plan(70, 20))
    assert end == 100
    partial = tokens.keys @ index.columns[1]
    torch.testing.assert_close(index.keys[1, :, :, :100].float(), partial, atol=1e-3, rtol=1e-2)
    assert index.keys[1, :, :, 100:].isnan().all()


def test_a_file_gives_the_skew(tmp_path: Path) -> None:
    path = tmp_path / "skew.safetensors"
    matrices = torch.stack(
        [torch.stack([turned(2 * layer + head) for head in range(2)]) for layer in range(2)]
    )
    save_file({"skew": matrices}, path)
    policy = InfiniGen(ratio=0.25, skew_path=str(path))
    index, tokens = policy.allocate(SHAPE), Tokens.random(50, 0)
    grow(policy, index, 1, tokens, policy.plan(50, 20))
    for layer in range(2):
        for head in range(HEADS):
            skewed = tokens.queries[layer, 2 * head : 2 * head + 2] @ matrices[layer, head]
            columns = skewed.abs().sum(dim=(0, 1)).topk(2).indices
            assert torch.equal(index.columns[1, layer, head], matrices[layer, head][:, columns])


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "skew.safetensors"
    save_file({"skew": torch.zeros(2, HEADS, DIM, DIM + 1)}, path)
    with pytest.raises(ConfigError, match=r"\[2, 2, 8, 9\].*\[2, 2, 8, 8\]"):
        InfiniGen(skew_path=str(path)).allocate(SHAPE)
    with pytest.raises(ConfigError, match="cannot be read"):
        InfiniGen(skew_path=str(tmp_path / "none")).allocate(SHAPE)
