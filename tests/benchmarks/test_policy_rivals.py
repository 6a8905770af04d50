"""Carrel's rivals with policies of every kind: what fills the caches, and the slots they take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.errors import NotMeasurable
from benchmarks.figures import DecodeCase, PrefillCase
from benchmarks.rivals import DECODE, PREFILL, bare_engine
from benchmarks.rivals.carrel_decode import CarrelDecode
from benchmarks.rivals.engine_slots import House
from benchmarks.rivals.replayed import ReplayedPQCache
from benchmarks.shapes import SHAPES
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.full.policy import Full
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.recall import Candidates
from gpu_worker.policies.registry import registry
from gpu_worker.policies.retain import RetainPolicy
from gpu_worker.policies.snapkv.policy import SnapKV
from gpu_worker.records import Budget
from gpu_worker.state.batch import Buckets
from kv_store.local import LocalStore

CPU, TINY = torch.device("cpu"), SHAPES["tiny"]
POLICIES = registry()
# One of each kind: trained or not, with a prompt attended in part; evicting, merging, in intervals, wrapped.
PREFILLING = (
    "pqcache",
    "clusterkv",
    "infllm+sparse",
    "streaming_llm",
    "chelsea",
    "snapkv+adakv+layerwise",
)
RETAINING = ("streaming_llm", "h2o", "cam", "chelsea", "snapkv+adakv+layerwise")
DECODED = DecodeCase("tiny", "chelsea", 40, 2, 200, None, None, 3)
PREFILLED = PrefillCase("tiny", "chelsea", 40, 200, None, 2)


@pytest.fixture(scope="module", autouse=True)
def one_store() -> Iterator[None]:
    """A store for all engines, in this process: each would wait a second for its own."""
    with LocalStore(1 << 28, num_trainers=1) as store, pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def running(_arena_bytes: int, _num_trainers: int) -> Iterator[str]:
            yield store.target

        patch.setattr(bare_engine, "running_store", running)
        yield


@pytest.fixture(scope="module")
def decoding() -> Any:
    return DECODE.rivals["carrel"].load()(TINY, CPU)


@pytest.fixture(scope="module")
def training() -> Any:
    return PREFILL.rivals["carrel index on gpu"].load()(TINY, CPU)


@pytest.mark.parametrize("name", PREFILLING)
def test_a_policy_of_each_kind_is_prefilled(name: str, training: Any) -> None:
    figures = training.measure(replace(PREFILLED, policy=name))
    assert figures.ttft_ms.n == figures.tt2t_ms.n == 2
    assert 0 < figures.ttft_ms.median < figures.tt2t_ms.median


def test_a_step_captured_while_the_house_fills_reads_what_is_replayed_later(
    decoding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a step looks for its selection before anything is replayed, it must look ever after."""
    looked: list[tuple[int, ...]] = []
    select = ReplayedPQCache.select

    def note(policy: ReplayedPQCache, *arguments: Any) -> torch.Tensor:
        found = select(policy, *arguments)
        looked.append((policy.traced.data_ptr(), found.untyped_storage().data_ptr()))
        return found

    monkeypatch.setattr(ReplayedPQCache, "select", note)
    figures = decoding.measure(replace(DECODED, policy="pqcache", hit_rate=0.9))
    # The first of two sequences decodes before the second is there, in every layer.
    assert len(looked) > TINY.num_layers
    assert len({*looked}) == 1
    assert figures.hit_rate == 1.0


def test_what_is_trained_nowhere_is_replayed_too(decoding: Any) -> None:
    figures = decoding.measure(replace(DECODED, policy="bitkeys", hit_rate=0.5))
    assert figures.hit_rate == 1.0
    with pytest.raises(NotMeasurable, match="replayed for pqcache and bitkeys, not for quest"):
        decoding.measure(replace(DECODED, policy="quest", hit_rate=0.5))


def test_a_padded_batch_is_replayed_too(decoding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where five sequences of six to come are a batch of eight lanes; here, however many there are."""
    monkeypatch.setattr(Buckets, "lanes", lambda *_: 8)
    rows: set[tuple[int, int]] = set()
    select = ReplayedPQCache.select

    def note(policy: ReplayedPQCache, index: Any, candidates: Candidates, *arguments: Any) -> torch.Tensor:
        found = select(policy, index, candidates, *arguments)
        rows.add((len(candidates.seats), len(found)))
        return found

    monkeypatch.setattr(ReplayedPQCache, "select", note)
    figures = decoding.measure(replace(DECODED, policy="pqcache", batch=6, hit_rate=0.9))
    assert figures.hit_rate == 1.0
    assert (8, 8) in rows
    assert all(asked == found for asked, found in rows)


@pytest.mark.parametrize("name", RETAINING)
def test_a_retain_policy_of_each_kind_decodes_over_random_caches(name: str, decoding: Any) -> None:
    figures = decoding.measure(replace(DECODED, policy=name))
    policy = POLICIES[name]
    assert isinstance(policy, RetainPolicy)
    plan = policy.plan(200, 40)
    again = policy.recompression(plan)
    interval = again.interval if again else 0
    # Whole intervals, so that compressing again counts as often as it comes.
    assert figures.step_ms.n == (interval or 3)
    assert (figures.mean_ms is None) == (interval == 0)
    if not interval:
        budget = plan.budget_tokens
        assert budget <= figures.attended_tokens <= budget + (0 if policy.evicts else 10)


def test_an_unknown_policy_is_told(decoding: Any, training: Any) -> None:
    with pytest.raises(NotMeasurable, match="no policy nope"):
        decoding.measure(replace(DECODED, policy="nope"))
    with pytest.raises(NotMeasurable, match="no policy nope"):
        training.measure(replace(PREFILLED, policy="nope"))


def test_a_policy_has_the_options_that_are_named_with_it(decoding: Any, training: Any) -> None:
    fitted = replace(DECODED, policy="bitkeys:rest=fitted,num_sink=2")
    assert decoding.measure(fitted).attended_tokens == DECODED.budget_tokens
    assert training.measure(replace(PREFILLED, policy="pqcache:num_bits=3")).ttft_ms.n == 2
    for measure, case in ((decoding.measure, DECODED), (training.measure, PREFILLED)):
        with pytest.raises(NotMeasurable, match="rest=odd: give none or fitted"):
            measure(replace(case, policy="bitkeys:rest=odd"))


def test_a_step_is_traced(decoding: Any, tmp_path: Path) -> None:
    case = replace(DECODED, policy="pqcache", profile=str(tmp_path / "traces"))
    decoding.measure(case)
    events = json.loads((tmp_path / "traces" / f"{case}.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" or "linear" in event.get("name", "") for event in events)


def test_a_sequence_that_fails_does_not_hang(decoding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compress(*_args: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Chelsea, "compress", compress)
    with pytest.raises(NotMeasurable, match="no device memory is left for policy 'chelsea'"):
        decoding.measure(DECODED)


def house(policy: Any, budget: Budget, decoding: CarrelDecode) -> House:
    return House(decoding.model(None), policy, budget, 2, 1000, 1064, 8192)


def test_a_retain_policy_takes_the_slots_that_it_keeps(decoding: CarrelDecode) -> None:
    def blocks(policy: Any) -> int:
        # of 64 slots, K and V of 16 in float32
        return house(policy, Budget(tokens=200), decoding).slots(None, True).num_bytes // (64 * 2 * 16 * 4)

    # 2 sequences of 2 layers and 2 heads: 17 blocks a head; or 200 kept and 64 decoded
    assert blocks(Full()) == 2 * 2 * 2 * 17
    assert blocks(PQCache()) == 2 * 2 * 2 * 17
    assert blocks(SnapKV()) == 2 * 2 * (2 * (200 + 64 + 63) // 64)


def test_under_a_limit_sequences_that_recall_share_what_is_left(decoding: CarrelDecode) -> None:
    recalling = house(PQCache(), Budget(tokens=200), decoding)
    every = recalling.slots(None, True)
    much = 16 << 30
    assert recalling.slots(much, True) == every
    others = much - recalling.room_beside_slots(much, True)
    # half of the slots
    limit = others + every.num_bytes // 2
    shared = recalling.slots(limit, True)
    assert every.num_bytes // 3 < shared.num_bytes <= every.num_bytes // 2
    with pytest.raises(NotMeasurable, match="2 sequences need"):
        # one sequence fits
        recalling.slots(others + every.num_bytes // 6, True)
    with pytest.raises(NotMeasurable, match="bytes of device memory are missing"):
        recalling.slots(others // 2, True)
    dense = house(Full(), Budget(share=1.0), decoding)
    with pytest.raises(NotMeasurable, match="2 sequences need"):
        dense.slots(much - dense.room_beside_slots(much, True) + every.num_bytes // 2 + 4096, True)
