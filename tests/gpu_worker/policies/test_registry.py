"""The registry: which policies there are, by which names, and what is said of each."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from gpu_worker.policies import registry as module
from gpu_worker.policies.adakv.policy import AdaKV
from gpu_worker.policies.base import Policy
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.layerwise.policy import LayerWise
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.protokv.policy import ProtoKV
from gpu_worker.policies.registry import METHODS, Method, ablations, check_name, names, registry
from gpu_worker.policies.semantickv.policy import SemanticKV
from gpu_worker.policies.snapkv.policy import SnapKV


def test_every_name_is_a_policys() -> None:
    policies = registry()
    assert set(policies) == set(names())
    assert all(policies[name].name == name for name in names())
    assert set(ablations()) < set(names())


def test_names_need_no_torch() -> None:
    code = "import sys; from gpu_worker.policies import registry; registry.names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_no_policy_has_is_refused_with_those_that_there_are() -> None:
    for name in ("auto", "full", "semantickv+no_sinks", "snapkv+adakv+layerwise"):
        check_name(name)
    with pytest.raises(
        ValueError, match=r"'h2o\+outlier'; choose one of auto, bitkeys, cam, .*chelsea, [^+]*; did"
    ):
        check_name("h2o+outlier", calibrated=True)
    for name in ("chelsea+outliers",):
        check_name(name, calibrated=True)
    with pytest.raises(ValueError, match="unknown policy"):
        check_name("chelsea+outliers")


def test_a_name_that_stands_there_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="two policies are named 'snapkv'"):
        registry(SnapKV(), SnapKV(window=4))
    monkeypatch.setattr(module, "METHODS", (*METHODS, Method("infllm+sparse", "InfLLM", folder="infllm")))
    with pytest.raises(ValueError, match=r"two policies are named 'infllm\+sparse'"):
        names()


def test_a_line_must_have_its_policys_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METHODS", (Method("quest", "Quest", variants={"wide": {"page_size": 64}}),))
    with pytest.raises(ValueError, match=r"'quest' as 'quest\+wide'"):
        registry()


def test_a_name_says_what_is_left_out() -> None:
    assert SemanticKV(reserve_sinks=False, by_norm=False).name == "semantickv+no_sinks+random"
    assert SemanticKV(reserve_recent=False, head_wise=False).name == "semantickv+no_recent+shared"
    assert LayerWise(Chelsea(chunked=False)).name == "chelsea+unchunked+layerwise"
    # A metric is in the name where it is to be.
    assert (PQCache(metric="ip").name, ClusterKV(metric="l2").name) == ("pqcache", "clusterkv")


GIVEN = (
    PQCache(num_bits=3),
    ClusterKV(num_sink=4),
    Chelsea(chunk=16),
    SemanticKV(num_sink=4),
    ProtoKV(window=6),
)


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: given.name)
def test_an_ablation_differs_from_the_method_that_is_given_in_one_thing(given: Any) -> None:
    policies = registry(given)
    kinds = [name for name, method in ablations().items() if method == given.name]
    assert kinds
    for name in kinds:
        ablation: Any = policies[name]
        differing = {
            field.name
            for field in fields(given)
            if getattr(given, field.name) != getattr(ablation, field.name)
        }
        assert len(differing - {"names_metric"}) == 1
    assert set(policies) == set(registry())


def test_forms_of_a_method_may_be_given_too() -> None:
    other = replace(ProtoKV(hash_prototypes=False), window=4)
    snap = SnapKV(window=5)
    policies: dict[str, Policy] = registry(other, snap)
    assert policies["protokv+chunks"] == other
    assert policies["protokv"] == ProtoKV()
    assert policies["snapkv+adakv+layerwise"] == LayerWise(AdaKV(snap))
