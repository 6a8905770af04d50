"""How every policy splits a budget, and where its window begins."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker.policies.base import Family
from gpu_worker.policies.bitkeys.policy import BitKeys
from gpu_worker.policies.cam.policy import CaM
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.full.policy import Full
from gpu_worker.policies.h2o.policy import H2O
from gpu_worker.policies.infinigen.policy import InfiniGen
from gpu_worker.policies.infllm.policy import InfLLM
from gpu_worker.policies.nacl.policy import NACL
from gpu_worker.policies.oracle.policy import Oracle
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.protokv.policy import ProtoKV
from gpu_worker.policies.quest.policy import Quest
from gpu_worker.policies.recall import RecallPolicy
from gpu_worker.policies.scissorhands.policy import Scissorhands
from gpu_worker.policies.semantickv.policy import SemanticKV
from gpu_worker.policies.snapkv.policy import SnapKV
from gpu_worker.policies.sparq.policy import SparQ

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


# Of 1000 tokens: the window and what is selected.
QUEST = {512: (16, 496), 100: (20, 80), 32: (16, 16), 31: (31, 0), 9: (9, 0)}
INFLLM = {1024: (128, 512, 384), 256: (64, 64, 128), 160: (40, 120, 0), 3: (1, 2, 0)}
SNAPKV = {64: 32, 63: 31, 10: 5, 3: 1, 2: 1}
PROTOKV = {64: 8, 16: 8, 15: 7, 9: 4, 7: 3, 3: 1, 2: 1}
# Of 1001 tokens.
CHELSEA = {
    1000: (16, 64, 920),
    144: (16, 64, 64),
    128: (16, 56, 56),
    79: (16, 31, 32),
    4: (1, 1, 2),
    2: (1, 0, 1),
}
SPLITS = [
    (SparQ(), 1000, 233, (32, 100, 101), None),
    *((Quest(), 1000, budget, (0, *rest), None) for budget, rest in QUEST.items()),
    (BitKeys(), 1000, 104, (4, 10, 90), None),
    (BitKeys(num_sink=0, recent_ratio=0.0), 1000, 104, (0, 0, 104), None),
    (InfiniGen(ratio=0.5), 1000, 233, (0, 0, 233), 1000),
    *((InfLLM(), 4000, budget, split, 4000) for budget, split in INFLLM.items()),
    (SnapKV(), 10000, 1024, (0, 32, 992), 32),
    # Half of a small budget is window.
    *((SnapKV(), 10000, n, (0, recent, n - recent), recent) for n, recent in SNAPKV.items()),
    *((ProtoKV(), 4097, n, (0, recent, n - recent), recent) for n, recent in PROTOKV.items()),
    *((Chelsea(), 1001, budget, split, None) for budget, split in CHELSEA.items()),
    (CaM(), 10000, 2000, (4, 1996, 0), 32),
    (H2O(), 1000, 201, (0, 100, 101), 1000),
    (SemanticKV(), 64000, 12800, (256, 640, 11904), 64000),
    # Sinks give way to a quarter of a small budget, the window to half of the rest.
    (SemanticKV(), 64000, 400, (100, 150, 150), 64000),
    (SemanticKV(), 90, 20, (5, 1, 14), 90),
    (NACL(), 100_000, 20_000, (256, 744, 19_000), 1000),
    (NACL(), 100_000, 400, (100, 150, 150), None),
    (NACL(), 25_600, 5120, (256, 0, 4864), None),
    (Scissorhands(), 10000, 2000, (0, 100, 1900), 400),
    (Scissorhands(), 100, 20, (0, 1, 19), 100),
]


@pytest.mark.parametrize(("policy", "num_prompt", "budget", "split", "num_queries"), SPLITS)
def test_a_budget_is_split_as_the_method_says(
    policy: Any, num_prompt: int, budget: int, split: tuple[int, int, int], num_queries: int | None
) -> None:
    plan = policy.plan(num_prompt, budget)
    assert (plan.num_sink, plan.num_recent, plan.num_selected) == split
    assert sum(split) == plan.budget_tokens == budget
    assert policy.window_begin(plan, num_prompt) == num_prompt - plan.num_recent
    if policy.family is Family.RECALL:
        assert policy.max_window(plan) == plan.num_recent
    if num_queries is not None:
        assert policy.num_queries(plan) == num_queries
    for covered in (num_prompt, 5 * num_prompt):
        assert not policy.plan(num_prompt, covered).selects
    # Those that compress later too observe queries at any budget.
    if policy.family is Family.RETAIN and not policy.evicts and policy.recompression(plan) is None:
        assert policy.num_queries(policy.plan(num_prompt, num_prompt)) == 0


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
