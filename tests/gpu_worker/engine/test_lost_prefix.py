"""Known prefixes that prompts must do without after all: these are computed anew, and the answers are the same."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest
from engine_rig import LAYOUT, Rig, random_prompt, request, tokens_alone
from offload_rig import attached

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.request import Status
from gpu_worker.records import GenerationRequest


def hold_proofs(rig: Rig) -> Future[int]:
    """What comparisons of shared slabs give from now on, once it is set."""
    proof: Future[int] = Future()
    rig.store.verify = lambda _sequence_id: proof  # type: ignore[method-assign,assignment]
    return proof


def lose_prefix(rig: Rig, name: str, proof: Future[int]) -> None:
    """Of a prompt all of which is computed, and its first token sampled or forced."""

    def is_computed() -> bool:
        found = rig.runner.prefills.get(rig.sequence(name))
        return found is not None and found.is_computed

    rig.step_until(is_computed)
    assert rig.sequence(name).num_cached
    rig.step()
    assert rig.status(name) is Status.PREFILL
    proof.set_result(1)
    rig.drain()


@pytest.mark.parametrize(
    "one",
    [
        request("one", "pqcache", 0.3, prompt=150),
        request("one", "pqcache", 0.3, prompt=150, num_prefill=140),
        request("one", "full", prompt=150, num_prefill=140),
        request("one", "snapkv", 0.3, prompt=150, num_prefill=140),
    ],
    ids=lambda one: f"{one.policy} {one.num_prefill_tokens}",
)
def test_a_prompt_whose_prefix_is_corrupt_goes_on_with_all_of_its_tokens(one: GenerationRequest) -> None:
    rig = Rig(reuses_prefixes=True)
    rig.run(request("before", prompt=150, max_tokens=1))
    proof = hold_proofs(rig)
    rig.submit(one)
    lose_prefix(rig, "one", proof)
    assert rig.records["one"].tokens == tokens_alone(one)
    rig.check_empty()


@pytest.mark.parametrize("policy", ["pqcache", "full"])
def test_who_gave_way_and_finds_its_prefix_corrupt_goes_on_with_the_answer_so_far(policy: str) -> None:
    one = request("one", policy, 0.3, prompt=150, max_tokens=20)
    rig = Rig(max_num_seqs=1, reuses_prefixes=True)
    rig.submit(one)
    rig.step_to("one", Status.DECODE, num_tokens=5)
    proof = hold_proofs(rig)
    rig.submit(replace(request("first", max_tokens=4, prompt=30), priority=-1))
    rig.step_until(lambda: rig.records["first"].is_over)
    lose_prefix(rig, "one", proof)
    assert rig.records["one"].tokens == tokens_alone(one)
    rig.check_empty()


def test_nobody_reaches_its_length_because_others_read_a_prefix() -> None:
    document = random_prompt(160, 1)
    one = request("one", "oracle", 0.3, prompt=random_prompt(150, 2), max_tokens=30)
    readers = [
        request(f"reader {seed}", prompt=(*document, *random_prompt(60, seed)), max_tokens=2)
        for seed in range(4)
    ]
    # An arena of 320 tokens, half of which the document fills: a slab has 16 tokens of one of three layers.
    with attached(LAYOUT, num_slabs=60) as (_, client):
        rig = Rig(client=client, reuses_prefixes=True, prefill_chunk=16, hot_cache=HotCacheSize(tokens=1))
        rig.run(request("document", prompt=document, max_tokens=1))
        rig.submit(one)
        rig.step_to("one", Status.DECODE)
        rig.submit(*readers)
        rig.drain()
        answers = {name: record.tokens for name, record in rig.records.items()}
        assert all(answers[each.request_id] == tokens_alone(each) for each in (one, *readers))
        assert rig.engine.stats().cached_tokens_total > 0
        assert not rig.runner.offloader.extents
