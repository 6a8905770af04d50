"""Layers that are compressed again: what the host knows without asking, and how seldom it asks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from device_reads import DeviceReads
from engine_rig import NUM_KV_HEADS, NUM_LAYERS, Rig, request, small_policies

from gpu_worker.caches.retain.cache import RetainCache
from gpu_worker.policies.base import Plan
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.layerwise.policy import LayerWise
from gpu_worker.policies.outlier_heads.policy import OutlierHeads
from gpu_worker.policies.retain import LayerRows, Retained, RetainPolicy
from gpu_worker.state.sequence import Sequence

INTERVAL, PROMPT = 9, 200
CHELSEA = Chelsea(num_sink=4, num_recent=6, chunk=16, interval_tokens=INTERVAL)


class Silent(Chelsea):
    """Does not say that nothing is padded: the host must ask, once."""

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        return replace(super().compress(rows, plan, budget), is_even=False)


SILENT = Silent(num_sink=4, num_recent=6, chunk=16, interval_tokens=INTERVAL)


def decoding(policy: RetainPolicy, budget: int) -> tuple[Rig, Sequence]:
    rig = Rig(policies={**small_policies(), policy.name: policy})
    rig.submit(request("one", policy.name, budget, prompt=PROMPT, max_tokens=60))
    while not rig.records["one"].tokens:
        rig.step()
    sequence = rig.sequence("one")
    return rig, sequence


@pytest.mark.parametrize("at_once", [1, 2, NUM_LAYERS])
@pytest.mark.parametrize(("policy", "waits"), [(CHELSEA, 0), (SILENT, 1)])
def test_the_host_waits_at_most_once_for_layers_that_are_compressed_together(
    policy: RetainPolicy, waits: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RetainCache, "_layers_at_once", lambda cache, sequence, again: at_once)
    rig, sequence = decoding(policy, 40)
    for _ in range(2):
        while sequence.num_tokens - sequence.kept.at < INTERVAL:
            rig.step()
        with torch.inference_mode(), DeviceReads() as reads:
            rig.runner.decode.advance(sequence)
        assert sequence.kept.at == sequence.num_tokens
        assert len(reads.found) == waits * -(-NUM_LAYERS // at_once), reads.found
    rig.drain()
    rig.check_empty()


@pytest.mark.parametrize(
    "policy",
    [
        CHELSEA,
        LayerWise(CHELSEA),
        OutlierHeads(CHELSEA, frozenset({(1, 0)}), NUM_KV_HEADS),
        OutlierHeads(LayerWise(CHELSEA), frozenset({(0, 1)}), NUM_KV_HEADS),
        small_policies()["scissorhands"],
        small_policies()["h2o"],
    ],
    ids=lambda policy: policy.name,
)
def test_the_host_knows_how_many_slots_each_head_has_filled(policy: RetainPolicy) -> None:
    rig, sequence = decoding(policy, 120)
    kept = rig.runner.caches.retain.kept
    unequal = False
    while len(rig.records["one"].tokens) < 60:
        num_decoded = sequence.num_tokens - sequence.kept.at
        known = [sequence.kept.layers[layer].lengths(num_decoded) for layer in range(NUM_LAYERS)]
        assert known == kept.lengths[sequence.seat].tolist()
        assert known == (kept.positions[sequence.seat] >= 0).sum(dim=-1).tolist()
        unequal |= len({count for counts in known for count in counts}) > 1
        rig.step()
    assert unequal == ("+" in policy.name)
    rig.check_empty()
