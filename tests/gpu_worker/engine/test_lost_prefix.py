"""A known prefix that turns out corrupt once the prompt is computed: that is done anew, and the answer is the same."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest
from engine_rig import Rig, request, tokens_alone

from gpu_worker.records import GenerationRequest
from gpu_worker.state.sequence import Status


def hold_proofs(rig: Rig) -> Future[int]:
    """What comparisons of shared slabs give from now on, once it is set."""
    proof: Future[int] = Future()
    rig.store.verify = lambda _sequence_id: proof  # type: ignore[method-assign]
    return proof


def lose_prefix(rig: Rig, name: str, proof: Future[int]) -> None:
    """Of a prompt all of which is computed, and its first token sampled or forced."""
    rig.step_until(lambda: rig.sequence(name) in rig.engine.prefills.computed)
    assert rig.sequence(name).num_cached
    rig.step()
    assert rig.sequence(name).status is Status.PREFILL
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
def test_the_prompt_goes_on_with_all_of_its_tokens(one: GenerationRequest) -> None:
    rig = Rig(reuses_prefixes=True)
    rig.run(request("before", prompt=150, max_tokens=1))
    proof = hold_proofs(rig)
    rig.submit(one)
    lose_prefix(rig, "one", proof)
    assert rig.records["one"].tokens == tokens_alone(one)
    rig.check_empty()


@pytest.mark.parametrize("policy", ["pqcache", "full"])
def test_who_gave_way_goes_on_with_the_answer_so_far(policy: str) -> None:
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
