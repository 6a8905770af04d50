"""The memory planned for a prompt's training is enough for what is allocated, and not much more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_rig import make_model
from live_bytes import LiveBytes

from gpu_worker.caches.layer_map import LayerMap
from gpu_worker.kernels.kmeans import lloyd
from gpu_worker.kernels.kmeans import reference as kmeans_reference
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.pqcache import policy as pqcache
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.pqcache.pq_score import reference as pq_reference
from gpu_worker.policies.recall import RecallPolicy, TrainedSegment
from gpu_worker.policies.registry import registry
from gpu_worker.records import Budget, IndexDevice
from gpu_worker.row_format import row_format
from gpu_worker.runner.prompts.prompt_memory import layer_training_bytes, prefill_bytes
from gpu_worker.runner.workload import Workload
from kv_store.client import PQParams

CPU = torch.device("cpu")
HEADS, HEAD_DIM, LENGTH = 2, 32, 3000
POLICIES = [
    ClusterKV(),
    ClusterKV(metric="l2"),
    ClusterKV(metric="ip"),
    ClusterKV(tokens_per_cluster=2),
    PQCache(num_bits=4),
    PQCache(num_bits=6),
    PQCache(num_subvectors=4, num_bits=8),
    PQCache(num_bits=4, metric="ip"),
    PQCache(num_subvectors=4, num_bits=6, metric="ip"),
]


def workload(
    dtype: torch.dtype = torch.bfloat16,
    length: int = LENGTH,
    default: str = "full",
    index_device: IndexDevice = IndexDevice.GPU,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
) -> Workload:
    shape = CacheShape(2, 1, heads, 2, row_format(head_dim, dtype), length, 0.2, CPU, dtype)
    config = make_model().config.with_attention(head_dim=head_dim, num_kv_heads=heads)
    layers = LayerMap.with_full(1)
    return Workload(config, shape, dtype, registry(), default, Budget(share=0.1), 64, layers, index_device)


def recall(name: str) -> RecallPolicy:
    policy = registry()[name]
    assert isinstance(policy, RecallPolicy)
    return policy


def allocated(
    policy: RecallPolicy, of: Workload, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Most bytes that a layer of the longest prompt had beside its keys and the index: while it was trained, and until
    it was loaded."""
    shape = replace(of.shape, device=device)
    plan = of.plan(policy)
    # Keys beside values, as a prompt's are.
    rows = torch.randn(HEADS, LENGTH, 2 * HEAD_DIM, generator=torch.Generator().manual_seed(0))
    rows = rows.to(device, of.dtype)
    begin = plan.num_sink
    job = policy.prompt_job(plan, begin, LENGTH)
    assert job is not None
    index = policy.allocate(shape)
    state = [getattr(index, name) for name in index.__slots__ if getattr(index, name) is not None]

    def train_and_load(peak: Callable[[], int]) -> tuple[int, int]:
        arrays = policy.train(rows[:, begin:, :HEAD_DIM], job, seed=1)
        trained = peak()
        policy.load(index, TrainedSegment(1, 0, job, arrays))
        return trained, peak()

    if device.type == "cuda":
        # What earlier tests left would be freed in between.
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return train_and_load(lambda: torch.cuda.max_memory_allocated() - before)
    live = LiveBytes(rows, *state)
    monkeypatch.setattr(lloyd, "assign_points", live.as_kernel(kmeans_reference.assign_points))
    monkeypatch.setattr(lloyd, "move_centroids", live.as_kernel(kmeans_reference.move_centroids))
    monkeypatch.setattr(pqcache, "pq_assign", live.as_kernel(pq_reference.pq_assign))
    with torch.inference_mode(), live:
        return train_and_load(lambda: live.peak)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_plan_bounds_what_training_and_loading_a_layer_allocates(
    device: str, policy: RecallPolicy, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = workload(dtype)
    of_trainer = layer_training_bytes(of, policy) - policy.load_bytes(HEADS * LENGTH)
    trained, loaded = allocated(policy, of, torch.device(device), monkeypatch)
    assert trained <= of_trainer
    assert loaded <= layer_training_bytes(of, policy)
    # What a sort copies is not seen on a CPU.
    assert of_trainer < 4 * trained


def test_only_who_copies_keys_gets_room_for_copies() -> None:
    heads, head_dim, length = 8, 128, 131072
    of = workload(length=length, heads=heads, head_dim=head_dim)
    keys = 2 * heads * head_dim * length
    need = {
        name: layer_training_bytes(of, recall(name))
        for name in ("pqcache", "pqcache+ip", "clusterkv", "clusterkv+l2", "clusterkv+ip")
    }
    # K-means reads keys where they lie, by any metric, and so does PQ; by inner product that makes two, of float32.
    assert need["clusterkv"] == need["clusterkv+l2"] == need["clusterkv+ip"] < 0.7 * keys
    assert need["pqcache"] < 0.3 * keys
    assert 4 * keys < need["pqcache+ip"] < 4.5 * keys


def test_a_prompt_gets_what_the_policies_ask_for_that_train_here() -> None:
    def extra(default: str, index_device: IndexDevice) -> int:
        one = workload(length=131072, heads=8, head_dim=128, default=default, index_device=index_device)
        return prefill_bytes(one) - prefill_bytes(
            replace(one, policies={"full": registry()["full"]}, default_policy="full")
        )

    of = workload(length=131072, heads=8, head_dim=128)
    need = {name: layer_training_bytes(of, recall(name)) for name in ("pqcache", "pqcache+ip", "clusterkv")}
    # An ablation is made room for when it is the default; ClusterKV's need is the greatest of the others.
    for default in ("full", "clusterkv", "clusterkv+ip", "pqcache"):
        assert extra(default, IndexDevice.GPU) == extra(default, IndexDevice.AUTO) == need["clusterkv"]
        assert extra(default, IndexDevice.CPU) == 0
    # PQ by inner product is the store's, unless all are trained here.
    assert extra("pqcache+ip", IndexDevice.GPU) == need["pqcache+ip"]
    assert extra("pqcache+ip", IndexDevice.AUTO) == need["clusterkv"]


def test_who_trains_nothing_needs_nothing() -> None:
    for name in ("oracle", "quest", "infinigen"):
        assert layer_training_bytes(workload(), recall(name)) == 0


def test_the_bytes_are_those_of_the_keys_shape_and_type() -> None:
    def need(num_tokens: int, dtype: torch.dtype) -> int:
        keys = torch.empty(2, num_tokens, 64, dtype=dtype, device="meta")
        return pqcache.pq_bytes(keys, PQParams(2, 6))

    # Beside a sample of the tokens, of their type: of each token a code of each part.
    for dtype in (torch.float32, torch.bfloat16):
        assert need(100000, dtype) - need(50000, dtype) == 50000 * 2 * 2
    assert need(50000, torch.float32) > need(50000, torch.bfloat16)
