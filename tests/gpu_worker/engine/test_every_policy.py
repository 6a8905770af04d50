"""Properties of every method, alone and in its wrappers, through the whole engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from engine_rig import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    SHAPE,
    Record,
    Rig,
    every_small_policy,
    llama_config,
    make_model,
    random_prompt,
    request,
    tried,
)
from naive_decoder import greedy
from torch import Tensor

from gpu_worker.caches import HotCacheSize
from gpu_worker.models import Decoder, LoadedModel, ungrouped
from gpu_worker.policies.base import Family
from gpu_worker.records import CompleteEvent, GenerationRequest
from gpu_worker.state.sequence import Sequence
from kv_store.client import Layout, RowFormat

POLICIES = tried()
SPARSE = sorted(POLICIES)
RETAIN = [name for name in SPARSE if POLICIES[name].family is Family.RETAIN]
RECALL = [name for name in SPARSE if POLICIES[name].family is Family.RECALL]
# A budget that compresses much, and more steps than any interval.
PROMPT, BUDGET, STEPS = 160, 64, 16
# Of the prompt, where the rest comes after it is compressed.
PREFILLED = 148
# One process runs the file, and answers every method's request alone once.
pytestmark = pytest.mark.xdist_group("every_policy")


def new_rig(**options: object) -> Rig:
    return Rig(policies=every_small_policy(), **options)  # type: ignore[arg-type]


def one(policy: str, budget: int | float = BUDGET, **options: object) -> GenerationRequest:
    options = {"prompt": PROMPT, "max_tokens": STEPS, **options}
    return request(policy, policy, budget, **options)  # type: ignore[arg-type]


@cache
def dense_tokens(prompt: int, steps: int) -> list[int]:
    """Return the answer to a random prompt of this length where everything is attended."""
    return greedy(make_model(), random_prompt(prompt), steps)[0]


@pytest.fixture(scope="module")
def alone() -> dict[str, Record]:
    """The answer of every method by itself."""
    return {name: new_rig().run(one(name))[0] for name in SPARSE}


def test_methods_differ(alone: dict[str, Record]) -> None:
    # Some may agree on a prompt; that most do would mean that they select nothing of their own.
    assert len({tuple(record.tokens) for record in alone.values()}) > len(alone) // 2


@pytest.mark.parametrize("hot_cache", [HotCacheSize(), HotCacheSize(tokens=1)])
def test_all_methods_in_one_batch_answer_as_each_alone(
    hot_cache: HotCacheSize, alone: dict[str, Record]
) -> None:
    rig = new_rig(max_num_seqs=len(SPARSE) + 1, slot_bytes=256 << 20, hot_cache=hot_cache)
    records = rig.run(request("dense", "full", prompt=90, max_tokens=30), *map(one, SPARSE))
    assert {len(record.tokens) for record in alone.values()} == {STEPS}
    assert records[0].tokens == dense_tokens(90, 30)
    assert all(rig.records[name].tokens == record.tokens for name, record in alone.items())
    rig.check_empty()


@pytest.mark.parametrize("policy", SPARSE)
def test_a_budget_of_the_whole_prompt_gives_the_dense_tokens(policy: str) -> None:
    rig = new_rig()
    whole, more = rig.run(
        one(policy, 1.0), request("more", policy, 10 * PROMPT, prompt=PROMPT, max_tokens=STEPS)
    )
    assert whole.tokens == dense_tokens(PROMPT, STEPS)
    assert more.tokens == whole.tokens
    rig.check_empty()


@pytest.mark.parametrize("policy", SPARSE)
def test_short_prompts_are_answered_at_any_budget(policy: str) -> None:
    rig = new_rig()
    budgets = (2, 5, 0.2, 0.5, 4000)
    asked = {
        (length, budget): request(f"{length} {budget}", policy, budget, prompt=length, max_tokens=12)
        for length in (1, 7, 20)
        for budget in budgets
    }
    for (length, budget), record in zip(asked, rig.run(*asked.values()), strict=True):
        if not isinstance(record.last, CompleteEvent):
            # Heads that keep everything may leave others too little, which is said.
            assert "outliers" in policy
            assert "outlier heads" in str(record.error)
            continue
        assert len(record.tokens) == 12
        if budget == budgets[-1]:
            assert record.tokens == dense_tokens(length, 12)
    rig.check_empty()


def with_alike_query_heads(model: LoadedModel, group: int) -> LoadedModel:
    """The same function with `group` query heads in place of each, all alike: its output's weights are shared out."""
    config = llama_config(replace(SHAPE, num_heads=group * model.config.num_heads))
    tensors = dict(model.decoder.named_parameters())
    num_query_rows = model.config.num_heads * HEAD_DIM
    for name, tensor in tensors.items():
        if name.endswith("qkv.matrix.weight"):
            query = tensor[:num_query_rows].unflatten(0, (-1, HEAD_DIM)).repeat_interleave(group, dim=0)
            tensors[name] = torch.nn.Parameter(torch.cat([query.flatten(0, 1), tensor[num_query_rows:]]))
        elif name.endswith(".o.matrix.weight"):
            heads = tensor.unflatten(1, (-1, HEAD_DIM)).repeat_interleave(group, dim=1)
            tensors[name] = torch.nn.Parameter(heads.flatten(1, 2) / group)
    decoder = Decoder(config, torch.device("cpu"), torch.float32)
    decoder.load_state_dict(tensors)
    return replace(model, config=config, decoder=decoder)


# `semantickv+random` draws for each query head.
@pytest.mark.parametrize("policy", [name for name in SPARSE if name != "semantickv+random"])
def test_query_heads_that_are_alike_select_as_one_of_them(policy: str) -> None:
    single = make_model(group=1)
    expected = new_rig(model=single).tokens(one(policy))
    rig = new_rig(model=with_alike_query_heads(single, 4))
    assert rig.tokens(one(policy)) == expected
    assert len(expected) == STEPS
    rig.check_empty()


def kept_after_prefill(rig: Rig, name: str) -> tuple[Sequence, Tensor]:
    """The sequence, and what each layer and head has kept of it: int64 [L, H_kv, S], -1 pads."""
    rig.submit(one(name))
    while not rig.records[name].tokens:
        rig.step()
    sequence = rig.sequence(name)
    kept = rig.runner.caches.retain.kept
    positions = kept.positions[sequence.seat]
    # The first token was sampled from the prompt's logits; a decode step may have added one more.
    return sequence, positions.where(positions < PROMPT, -1).clone()


@pytest.mark.parametrize("policy", RETAIN)
def test_a_budget_is_kept_exactly_and_sinks_and_window_with_it(policy: str) -> None:
    rig = new_rig()
    sequence, positions = kept_after_prefill(rig, policy)
    plan = sequence.plan
    kept = int((positions >= 0).sum())
    # Every step but the first has evicted one token of each head.
    num_evicted = max(0, sequence.num_tokens - PROMPT - 1) if POLICIES[policy].evicts else 0  # type: ignore[attr-defined]
    asked = (plan.budget_tokens - num_evicted) * NUM_LAYERS * NUM_KV_HEADS
    # Outlier heads leave less than a token a head.
    assert kept == asked if "outliers" not in policy else 0 <= asked - kept < NUM_LAYERS * NUM_KV_HEADS
    for layer in range(NUM_LAYERS):
        for head in range(NUM_KV_HEADS):
            held = positions[layer, head]
            held = held[held >= 0]
            assert held.unique().shape == held.shape
            must = [*range(plan.num_sink), *range(sequence.window_begin, PROMPT)]
            assert set(must) <= set(held.tolist())
    rig.drain()
    rig.check_empty()


@pytest.mark.parametrize("policy", [name for name in RETAIN if "outliers" not in name])
def test_layers_and_heads_get_what_their_wrapper_gives(policy: str) -> None:
    _sequence, positions = kept_after_prefill(new_rig(), policy)
    counts = (positions >= 0).sum(dim=2)
    by_layer = counts.sum(dim=1).tolist()
    is_pyramid = "layerwise" in policy or policy == "pyramidkv"
    assert by_layer == sorted(by_layer, reverse=True)
    assert (by_layer[0] > by_layer[-1]) == is_pyramid
    if "adakv" not in policy:
        assert torch.equal(counts, counts[:, :1].expand_as(counts))


@pytest.mark.parametrize("policy", SPARSE)
def test_the_account_says_what_was_attended(policy: str, alone: dict[str, Record]) -> None:
    usage = alone[policy].usage
    plan = POLICIES[policy].plan(PROMPT, BUDGET)
    # Before the new token: the budget, and what was decoded since where nothing of it is given up.
    most = plan.budget_tokens + (STEPS - 2) / 2
    assert plan.budget_tokens // 2 <= usage.attended_tokens <= most
    if policy in RECALL:
        assert usage.attended_tokens == pytest.approx(plan.budget_tokens, abs=1)
    assert usage.budget_tokens == plan.budget_tokens


@pytest.mark.parametrize("policy", SPARSE)
def test_a_question_may_come_after_the_context_is_compressed(policy: str) -> None:
    rig = new_rig()
    late, dense = rig.run(
        one(policy, num_prefill=PREFILLED),
        request("dense", policy, PREFILLED, prompt=PROMPT, num_prefill=PREFILLED, max_tokens=9),
    )
    assert len(late.tokens) == STEPS
    if policy in RECALL:
        # The forced steps attend no more than the others.
        assert late.usage.attended_tokens == pytest.approx(BUDGET, abs=1)
    # What was prefilled is what the budget is of: there is nothing to select where it covers that.
    assert dense.tokens == dense_tokens(PROMPT, 9)
    budget = POLICIES[policy].plan(PREFILLED, BUDGET).budget_tokens
    assert (late.usage.prompt_tokens, late.usage.budget_tokens) == (PROMPT, budget)
    rig.check_empty()


@pytest.mark.parametrize("policy", SPARSE)
def test_what_is_attended_can_be_measured(policy: str) -> None:
    rig = new_rig()
    usage = rig.run(one(policy, measure=True, max_tokens=6))[0].usage
    if POLICIES[policy].plan(100, 30).has_means:
        assert usage.attention_mass is None
    else:
        assert usage.attention_mass is not None
        assert 0.2 < usage.attention_mass <= 1.0 + 1e-5
    rig.check_empty()


def test_each_query_head_may_have_what_it_alone_needs() -> None:
    """With KV of its own for each query head the budget is every one's: what is kept differs within a group."""
    model = ungrouped(make_model())
    rig = new_rig(model=model, layout=Layout(NUM_LAYERS, model.config.num_kv_heads, RowFormat(16, "fp32")))
    _, positions = kept_after_prefill(rig, "snapkv")
    assert positions.shape[1] == 3 * NUM_KV_HEADS
    kept = [{*head.tolist()} - {-1} for head in positions[1]]
    assert [len(head) for head in kept] == [BUDGET] * len(kept)
    assert len({frozenset(head) for head in kept}) == len(kept)
    dense = rig.run(request("dense", "full", prompt=PROMPT, max_tokens=STEPS))[0]
    assert dense.tokens == dense_tokens(PROMPT, STEPS)
    recalled = rig.run(request("recalled", "pqcache", BUDGET, prompt=PROMPT, max_tokens=STEPS))[0]
    assert len(recalled.tokens) == STEPS
    rig.drain()
    rig.check_empty()
