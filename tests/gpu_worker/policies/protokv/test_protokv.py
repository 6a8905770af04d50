"""ProtoKV: groups around chunks and hash buckets, and the window's votes averaged over them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_worker.policies.base import Plan
from gpu_worker.policies.hyper_parameters import Between, hyper_parameters, with_options
from gpu_worker.policies.protokv.group_means import group_means
from gpu_worker.policies.protokv.hash_buckets import RandomFeatures
from gpu_worker.policies.protokv.policy import ProtoKV
from gpu_worker.policies.retain import LayerRows, Retained
from gpu_worker.policies.scored import Scores

DIM = 8
POLICIES = [
    ProtoKV(window=4, chunk_length=10, num_bits=2, num_irregular=6),
    ProtoKV(window=4, chunk_length=10, num_bits=2, num_irregular=6, hash_prototypes=False),
    ProtoKV(window=4, chunk_length=10, num_bits=2, num_irregular=6, chunk_prototypes=False),
]
KINDS = ["both", "chunk-only", "LSH-only"]


def random_rows(n: int, heads: int = 2, group: int = 2, window: int = 4, seed: int = 0) -> LayerRows:
    generator = torch.Generator().manual_seed(seed)
    # A chunk's keys resemble each other.
    places = torch.arange(n) // 10
    themes = torch.randn(heads, n // 10 + 1, 2 * DIM, generator=generator)[:, places]
    rows = themes + torch.randn(heads, n, 2 * DIM, generator=generator)
    queries = 2 * torch.randn(heads * group, window, DIM, generator=generator)
    return LayerRows.of_prompt(3, 7, rows, queries, DIM**-0.5, seed)


def rows_of(keys: Tensor, queries: Tensor) -> LayerRows:
    """keys: [n, d] of one head. queries: [w, d]."""
    return LayerRows.of_prompt(0, 1, torch.cat([keys, keys], dim=1)[None], queries[None], scale=1.0)


def compress(policy: ProtoKV, rows: LayerRows, budget: int) -> Retained:
    plan = policy.plan(rows.keys.shape[1], budget)
    assert plan.selects
    assert rows.queries.shape[1] == policy.num_queries(plan)
    return policy.compress(rows, plan, budget)


def scores(policy: ProtoKV, rows: LayerRows) -> Tensor:
    """Return the prefix's scores: [H, n_p]."""
    num_tokens = rows.keys.shape[1]
    plan = Plan(num_tokens, 0, 0, rows.queries.shape[1], 0)
    return policy.score(rows, plan).first[:, : num_tokens - plan.num_recent]


def second(scored: Scores) -> Tensor:
    assert scored.second is not None
    return scored.second


# A slow reference, one token at a time in float64.


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def chunks_of(num_tokens: int, num_chunks: int) -> list[list[int]]:
    length = num_tokens // num_chunks
    bounds = [m * length for m in range(num_chunks)] + [num_tokens]
    return [list(range(bounds[m], bounds[m + 1])) for m in range(num_chunks)]


def outliers_of(keys: Tensor, chunks: list[list[int]], count: int) -> list[int]:
    deviation = {}
    for chunk in chunks:
        mean = keys[chunk].mean(dim=0)
        spread = keys[chunk].std(dim=0, unbiased=False).norm()
        for token in chunk:
            deviation[token] = (1 - cosine(keys[token], mean)) / max(float(spread), 1e-6)
    return sorted(deviation, key=lambda token: -deviation[token])[:count]


def buckets_of(keys: Tensor, tokens: list[int], weights: Tensor, phases: Tensor, u: int) -> list[list[int]]:
    buckets: list[list[int]] = [[] for _ in range(u)]
    for token in tokens:
        number = 0
        for bit in range(weights.shape[1]):
            angle = float(keys[token] / keys[token].norm() @ weights[:, bit] + phases[bit])
            number = 2 * number + (math.cos(angle) > 0)
        buckets[number % u].append(token)
    return buckets


def votes_of(rows: LayerRows, head: int) -> list[float]:
    num_tokens, (_, window, _) = rows.keys.shape[1], rows.queries.shape
    votes, keys = [0.0] * num_tokens, rows.keys[head].double()
    for query_head in range(head * rows.group_size, (head + 1) * rows.group_size):
        for i in range(window):
            seen = num_tokens - window + i + 1
            logits = [float(rows.queries[query_head, i].double() @ keys[t]) * rows.scale for t in range(seen)]
            total = sum(math.exp(logit) for logit in logits)
            for t in range(seen):
                votes[t] += math.exp(logits[t]) / total / rows.group_size
    return votes


def reference(policy: ProtoKV, rows: LayerRows) -> Tensor:
    """Group means of the prefix: float64 [H, n_p]."""
    num_prefix = rows.keys.shape[1] - rows.queries.shape[1]
    k, u = max(1, num_prefix // policy.chunk_length), 2**policy.num_bits
    every = list(range(num_prefix))
    if not policy.chunk_prototypes:
        u += k
    draw = RandomFeatures.draw(rows.keys, u, policy.gamma, rows.seed * rows.num_layers + rows.layer)
    scores = []
    for head in range(rows.keys.shape[0]):
        keys = rows.keys[head, :num_prefix].double()
        features = draw.weights[head].double(), draw.phases[head, 0].double(), u
        if not policy.hash_prototypes:
            length = max(1, num_prefix // (k + u))
            groups = chunks_of(num_prefix, num_prefix // length)
        elif not policy.chunk_prototypes:
            groups = buckets_of(keys, every, *features)
        else:
            chunks = chunks_of(num_prefix, k)
            outliers = outliers_of(keys, chunks, policy.num_irregular)
            groups = [[token for token in chunk if token not in outliers] for chunk in chunks]
            groups += buckets_of(keys, outliers, *features)
        sums = [keys[group].sum(dim=0) for group in groups if group]
        clusters: dict[int, list[int]] = {}
        for token in every:
            nearest = max(range(len(sums)), key=lambda m: cosine(keys[token], sums[m]))
            clusters.setdefault(nearest, []).append(token)
        votes, pooled = votes_of(rows, head), torch.zeros(num_prefix, dtype=torch.float64)
        for members in clusters.values():
            pooled[members] = sum(votes[token] for token in members) / len(members)
        scores.append(pooled)
    return torch.stack(scores)


@pytest.mark.parametrize("policy", POLICIES, ids=KINDS)
@pytest.mark.parametrize("n", [7, 9, 14, 44, 57, 93])
def test_scores_are_the_slow_references(policy: ProtoKV, n: int) -> None:
    """Prefixes of 3 (fewer than the irregular tokens), 5 (than a chunk), one and four chunks, and with a rest."""
    for seed in range(2):
        rows = random_rows(n, seed=seed)
        assert_near(scores(policy, rows), reference(policy, rows))


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-4)


def test_a_mean_dilutes_a_needle_among_many_and_lifts_among_few() -> None:
    """Groups of ten keys, two keys and eight keys, each along an axis; the needle of the ten is voted for more than
    that of the two, by hand e^9 to e^8.5 to e for the rest of both and 1 for the eight and the window."""
    keys = torch.zeros(22, DIM)
    keys[:10, 0], keys[10:12, 1], keys[12:20, 2] = 1, 1, 1
    keys[4, 0], keys[11, 1] = 9, 8.5
    rows = rows_of(keys, (torch.eye(DIM)[0] + torch.eye(DIM)[1]).expand(2, DIM))
    policy = ProtoKV(window=2, chunk_length=2, num_irregular=0)
    pooled = policy.score(rows, policy.plan(22, 4)).first[0]
    total = math.exp(9) + math.exp(8.5) + 10 * math.exp(1) + 8
    # The first query sees one window token, the second both.
    votes = [1 / (total + 1) + 1 / (total + 2)] * 3
    votes[0] *= (math.exp(9) + 9 * math.exp(1)) / 10
    votes[1] *= (math.exp(8.5) + math.exp(1)) / 2
    expected = torch.tensor([votes[0]] * 10 + [votes[1]] * 2 + [votes[2]] * 8)
    torch.testing.assert_close(pooled[:20], expected)
    assert compress(policy, rows, 4).positions.tolist() == [[10, 11, 20, 21]]


def test_a_groups_members_go_by_own_vote_and_then_recency() -> None:
    """All are one group; 3 and 9 are longer, the others equal."""
    keys = torch.zeros(20, DIM)
    keys[:, 0] = 1
    keys[3, 0], keys[9, 0] = 2, 1.5
    rows = rows_of(keys, torch.eye(DIM)[0].expand(4, DIM))
    policy = ProtoKV(window=4, chunk_length=8, num_irregular=0)
    kept = [compress(policy, rows, budget).positions[0, :-4].tolist() for budget in (8, 9, 10, 12)]
    assert kept == [[3, 9, 14, 15], [3, 9, 13, 14, 15], [3, 9, *range(12, 16)], [3, 9, *range(10, 16)]]


def test_of_equally_irregular_tokens_the_later_make_the_buckets() -> None:
    """Chunks of one token each turn away from nothing: the last three share the only bucket."""
    keys = torch.eye(DIM)
    rows = rows_of(keys, torch.arange(DIM).float().expand(2, DIM))
    policy = ProtoKV(window=2, chunk_length=1, num_bits=0, num_irregular=3)
    scored = policy.score(rows, policy.plan(DIM, 4))
    own, means = second(scored)[0], scored.first[0]
    torch.testing.assert_close(means[:3], own[:3])
    torch.testing.assert_close(means[3:6], own[3:6].mean().expand(3))


@pytest.mark.parametrize("policy", POLICIES, ids=KINDS)
def test_zero_keys_give_no_nan(policy: ProtoKV) -> None:
    rows = random_rows(60)
    rows.keys[0] = 0
    rows.keys[1, ::3] = 0
    assert scores(policy, rows).isfinite().all()
    kept = compress(policy, rows, 20)
    assert kept.counts.tolist() == [20, 20]
    # Nothing tells the first head's tokens apart: the last ones stay.
    assert kept.positions[0].tolist() == list(range(40, 60))


def test_half_precision_rows_stay_so() -> None:
    rows = random_rows(60)
    both = torch.cat([rows.keys, rows.values], dim=2).bfloat16()
    half = LayerRows.of_prompt(3, 7, both, rows.queries.bfloat16(), rows.scale)
    assert compress(POLICIES[0], half, 20).keys.dtype == torch.bfloat16
    assert_near(scores(POLICIES[0], half), reference(POLICIES[0], half))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES, ids=KINDS)
def test_a_gpu_scores_alike_and_nobody_waits_for_it(policy: ProtoKV) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    here = random_rows(1003, heads=3)
    both = torch.cat([here.keys, here.values], dim=2).cuda()
    there = LayerRows.of_prompt(3, 7, both, here.queries.cuda(), here.scale, here.seed)
    plan = policy.plan(1003, 100)
    # What compiles may wait.
    policy.score(there, plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = policy.score(there, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = policy.score(here, plan)
    torch.testing.assert_close(second(found).cpu(), second(expected), atol=1e-6, rtol=1e-4)
    # A key between two prototypes may go to either by a rounding error, and changes their groups' means.
    assert (found.first.cpu() / expected.first - 1).abs()[:, :-4].lt(1e-3).float().mean() > 0.9


def test_the_widest_window_is_as_many_votes_as_can_be_added_up() -> None:
    widest = hyper_parameters(ProtoKV())["window"].rule
    assert isinstance(widest, Between)
    # All of a head's votes on the tokens of one group.
    votes = torch.full((1, 4), widest.high / 4)
    means = group_means(votes, torch.zeros(1, 4, dtype=torch.int32), 1)
    assert torch.equal(means, votes)
    with pytest.raises(ValueError, match="window=16385: give 1 to 16384"):
        with_options(ProtoKV(), {"window": "16385"})
