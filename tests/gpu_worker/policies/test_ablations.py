"""The papers' ablations by name."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from gpu_worker.policies import (
    Chelsea,
    ClusterKV,
    LayerWise,
    Policy,
    PQCache,
    ProtoKV,
    SemanticKV,
    SnapKV,
    registry,
)


def test_a_name_says_what_is_left_out() -> None:
    assert SemanticKV(reserve_sinks=False, by_norm=False).name == "semantickv+no_sinks+random"
    assert SemanticKV(reserve_recent=False, head_wise=False).name == "semantickv+no_recent+shared"
    assert SemanticKV(count_corrected=True).name == "semantickv+corrected"
    assert ProtoKV(hash_prototypes=False).name == "protokv+chunks"
    assert ProtoKV(chunk_prototypes=False).name == "protokv+hashes"
    assert LayerWise(Chelsea(chunked=False)).name == "chelsea+unchunked+layerwise"


def test_a_metric_is_in_the_name_where_it_is_to_be() -> None:
    assert (PQCache(metric="ip").name, ClusterKV(metric="l2").name) == ("pqcache", "clusterkv")
    assert PQCache(metric="ip", names_metric=True).name == "pqcache+ip"
    assert ClusterKV(metric="l2", names_metric=True).name == "clusterkv+l2"


METHODS = (
    PQCache(num_bits=3),
    ClusterKV(num_sink=4),
    Chelsea(chunk=16),
    SemanticKV(num_sink=4),
    ProtoKV(window=6),
)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_ablations_differ_from_their_method_in_one_thing(method: Policy) -> None:
    policies = registry(method)
    for ablation in method.ablations():
        assert policies[ablation.name] == ablation
        differing = {
            field.name
            for field in fields(method)  # type: ignore[arg-type]
            if getattr(method, field.name) != getattr(ablation, field.name)
        }
        assert len(differing - {"names_metric"}) == 1
        # An ablation has none of its own.
        assert {one.name for one in ablation.ablations()} == {one.name for one in method.ablations()}
    assert set(policies) == set(registry())


def test_an_ablation_may_be_given_with_other_values() -> None:
    other = replace(ProtoKV(hash_prototypes=False), window=4)
    policies = registry(other)
    assert policies["protokv+chunks"] == other
    assert policies["protokv"] == ProtoKV()
    assert SnapKV().ablations() == ()
