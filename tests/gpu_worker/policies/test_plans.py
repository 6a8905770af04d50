"""How every policy splits a budget, and where its window begins."""

from __future__ import annotations

import pytest

from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.full.policy import Full
from gpu_worker.policies.oracle.policy import Oracle
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.recall import RecallPolicy

POLICIES = [
    PQCache(),
    Oracle(),
    ClusterKV(),
    PQCache(num_bits=3, num_sink=4, recent_ratio=0.2),
    Oracle(num_sink=1, recent_ratio=0.9),
    ClusterKV(num_sink=3, tokens_per_cluster=5, window_size=20),
]
LENGTHS = [1, 2, 3, 5, 16, 17, 31, 33, 64, 80, 97, 100, 129, 300, 1000, 4097]


def budgets(num_prompt: int) -> list[int]:
    shares = [num_prompt // 20, num_prompt // 10, num_prompt // 5, num_prompt // 2]
    edges = [2, 3, 4, 7, num_prompt - 1, num_prompt, num_prompt + 1, 10 * num_prompt, 100000]
    return sorted({budget for budget in shares + edges if budget >= 2})


@pytest.mark.parametrize("num_prompt", LENGTHS)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_plan_spends_its_budget_exactly_or_attends_everything(
    policy: RecallPolicy, num_prompt: int
) -> None:
    for budget in budgets(num_prompt):
        plan = policy.plan(num_prompt, budget)
        assert (plan.num_prompt_tokens, plan.budget_tokens) == (num_prompt, budget)
        assert 1 <= plan.num_sink <= num_prompt
        if plan.selects:
            assert budget < num_prompt
            assert plan.num_sink + plan.num_recent + plan.num_selected == budget
            assert plan.num_selected >= 1
            # What is selected from is more than what is selected.
            assert policy.window_begin(plan, num_prompt) - plan.num_sink > plan.num_selected


@pytest.mark.parametrize("policy", [PQCache(), Oracle(), ClusterKV()], ids=repr)
@pytest.mark.parametrize("num_prompt", [200, 1000, 4097])
def test_a_budget_from_the_whole_prompt_on_attends_everything(policy: RecallPolicy, num_prompt: int) -> None:
    assert policy.plan(num_prompt, num_prompt - 1).selects or policy.name == "pqcache"
    for budget in (num_prompt, num_prompt + 1, 100 * num_prompt):
        assert not policy.plan(num_prompt, budget).selects


def test_the_papers_defaults_at_a_long_prompt() -> None:
    pqcache = PQCache().plan(10032, 2032)
    assert (pqcache.num_sink, pqcache.num_recent, pqcache.num_selected) == (32, 1000, 1000)
    oracle = Oracle().plan(10032, 2032)
    assert (oracle.num_sink, oracle.num_recent, oracle.num_selected) == (32, 1000, 1000)
    clusterkv = ClusterKV().plan(32000, 1024)
    assert (clusterkv.num_sink, clusterkv.num_recent, clusterkv.num_selected) == (16, 0, 1008)
    assert clusterkv.window_extra
    job = ClusterKV().prompt_job(clusterkv, 16, 32000)
    # Half of the iterations that the paper makes at most: see the policy.
    assert (job.params.num_clusters, job.params.metric, job.params.max_iterations) == (399, "cosine", 10)
    window_job = ClusterKV().leaving_job(clusterkv, 32000, 32320)
    assert (window_job.begin, window_job.end, window_job.params.num_clusters) == (32000, 32320, 4)
    # Each job's clusters come behind those of the jobs before it.
    assert (job.num_before, window_job.num_before) == (0, 399)
    assert ClusterKV().leaving_job(clusterkv, 32000 + 3 * 320, 32000 + 4 * 320).num_before == 399 + 3 * 4
    job = PQCache().prompt_job(pqcache, 32, 9032)
    assert (job.params.num_subvectors, job.params.num_bits, job.params.max_iterations) == (2, 6, 0)


def test_prompts_too_short_to_be_indexed_attend_everything() -> None:
    # 64 centroids need 64 candidates.
    assert not PQCache().plan(94, 50).selects
    assert PQCache().plan(95, 50).selects
    # One cluster needs 80 candidates; the sinks are no candidates.
    assert not ClusterKV().plan(95, 64).selects
    assert ClusterKV().plan(96, 64).selects


@pytest.mark.parametrize("num_prompt", [5, 20, 100, 1000])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_window_never_moves_back_and_stays_within_its_bound(
    policy: RecallPolicy, num_prompt: int
) -> None:
    for budget in (2, 3, num_prompt // 4 + 2, num_prompt + 50):
        plan = policy.plan(num_prompt, budget)
        begins = [policy.window_begin(plan, num_tokens) for num_tokens in range(num_prompt, num_prompt + 900)]
        assert begins == sorted(begins)
        assert begins[0] >= plan.num_sink
        for num_tokens, begin in enumerate(begins, start=num_prompt):
            assert plan.num_sink <= begin <= num_tokens
            if plan.selects:
                assert num_tokens - begin <= policy.max_window(plan)
                assert plan.window_extra or num_tokens - begin == plan.num_recent


def test_clusterkv_keeps_generated_tokens_until_the_window_is_full() -> None:
    policy = ClusterKV()
    plan = policy.plan(1000, 200)
    assert [policy.window_begin(plan, 1000 + n) for n in (0, 1, 319, 320, 321, 639, 640)] == [
        1000, 1000, 1000, 1320, 1320, 1320, 1640,
    ]  # fmt: skip


def test_full_attends_everything_at_any_budget() -> None:
    plan = Full().plan(1000, 10)
    assert not plan.selects
    assert plan.budget_tokens == 1000
