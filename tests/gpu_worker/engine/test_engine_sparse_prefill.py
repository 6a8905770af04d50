"""InfLLM's sparse prefill through the engine: the same answers however it is served, and rows that nobody else gets."""

from __future__ import annotations

import torch
from engine_rig import NUM_LAYERS, Rig, make_model, random_prompt, request, small_policies
from naive_decoder import greedy

from gpu_worker.policies.base import Policy
from gpu_worker.policies.infllm.policy import InfLLM

PROMPT, BUDGET, STEPS = 200, 60, 20


def policies() -> dict[str, Policy]:
    both = [
        InfLLM(block_size=8, repr_topk=2, num_sink=4, sparse_prefill=on, chunk_size=16)
        for on in (False, True)
    ]
    return {**small_policies(), **{policy.name: policy for policy in both}}


def first_layers(rig: Rig, name: str) -> list[torch.Tensor]:
    """The prompt's rows in the store, layer by layer."""
    prefill = rig.records[name]
    while not prefill.tokens:
        rig.step()
    sequence = rig.sequence(name)
    return [
        rig.runner.offloader.host.inspect(sequence, layer, 2)[:, :PROMPT].clone()
        for layer in range(NUM_LAYERS)
    ]


def test_layers_behind_the_first_are_computed_from_what_was_attended() -> None:
    rows = {}
    for name in ("infllm", "infllm+sparse"):
        rig = Rig(policies=policies())
        rig.submit(request(name, name, BUDGET, prompt=PROMPT, measure=True))
        rows[name] = first_layers(rig, name)
    dense = greedy(make_model(), random_prompt(PROMPT), 1)[1]
    for layer in range(NUM_LAYERS):
        torch.testing.assert_close(rows["infllm"][layer], dense[layer], atol=1e-4, rtol=1e-3)
    # The first layer's rows need no attention, and the first queries have nothing to leave out.
    torch.testing.assert_close(rows["infllm+sparse"][0], dense[0], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(rows["infllm+sparse"][2][:, :48], dense[2][:, :48], atol=1e-4, rtol=1e-3)
    for layer in (1, 2):
        assert not torch.allclose(rows["infllm+sparse"][layer][:, 150:], dense[layer][:, 150:], atol=1e-2)


def test_answers_do_not_depend_on_quanta_of_whole_chunks() -> None:
    asked = request("one", "infllm+sparse", BUDGET, prompt=PROMPT, max_tokens=STEPS)
    expected = Rig(policies=policies(), prefill_chunk=16).tokens(asked)
    for chunk in (64, 208):
        assert Rig(policies=policies(), prefill_chunk=chunk).tokens(asked) == expected
    assert expected != Rig(policies=policies()).tokens(request("one", "infllm", BUDGET, prompt=PROMPT))


def test_layers_that_are_dense_for_everyone_are_prefilled_densely() -> None:
    rig = Rig(policies=policies(), full_layers=NUM_LAYERS)
    tokens = rig.tokens(request("one", "infllm+sparse", BUDGET, prompt=PROMPT, max_tokens=STEPS))
    assert tokens == greedy(make_model(), random_prompt(PROMPT), STEPS)[0]


def test_rows_of_a_sparse_prefill_are_no_prefix_for_others() -> None:
    prompt = random_prompt(PROMPT)
    expected = greedy(make_model(), (*prompt, 5, 6, 7), STEPS)[0]
    for policy, is_shared in (("infllm", True), ("infllm+sparse", False)):
        rig = Rig(policies=policies(), reuses_prefixes=True, tokens_per_slab=64)
        rig.tokens(request("first", policy, BUDGET, prompt=PROMPT, measure=True))
        later = rig.run(request("later", "pqcache", 1.0, prompt=(*prompt, 5, 6, 7), max_tokens=STEPS))[0]
        assert (later.usage.cached_tokens > 0) == is_shared
        assert later.tokens == expected
    # Nor does it take any.
    rig = Rig(policies=policies(), reuses_prefixes=True, tokens_per_slab=64)
    rig.tokens(request("dense", "pqcache", 1.0, prompt=PROMPT))
    alone = Rig(policies=policies()).tokens(request("one", "infllm+sparse", BUDGET, prompt=PROMPT))
    after = rig.run(request("one", "infllm+sparse", BUDGET, prompt=PROMPT))[0]
    assert (after.tokens, after.usage.cached_tokens) == (alone, 0)
