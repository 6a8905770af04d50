"""Prompts that begin alike: what is computed once, who shares it, and that no answer changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_rig import (
    SHAPE,
    Rig,
    every_small_policy,
    llama_config,
    make_model,
    random_prompt,
    request,
    tokens_alone,
)
from offload_rig import make_sequence

from gpu_worker.engine.request import Status
from gpu_worker.policies.base import Family
from gpu_worker.records import GenerationRequest, ProgressEvent
from gpu_worker.store.prefixes import Prefixes, model_root

RECALL = sorted(name for name, policy in every_small_policy().items() if policy.family is Family.RECALL)
# Their scores need the queries of the whole prompt.
READS_ALL_QUERIES = {"infinigen", "infllm", "infllm+sparse", "infllm+sparse+clamp"}
ROOT = b"r" * 32
DOCUMENT = random_prompt(300)


def asked(name: str, policy: str, prompt: tuple[int, ...], **options: object) -> GenerationRequest:
    return request(name, policy, 0.25, prompt=prompt, max_tokens=20, **options)  # type: ignore[arg-type]


def reusing(**options: object) -> Rig:
    return Rig(policies=every_small_policy(), reuses_prefixes=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", RECALL)
def test_a_second_question_about_a_document_is_answered_as_by_a_cold_engine(policy: str) -> None:
    first = asked("first", policy, DOCUMENT + random_prompt(30, seed=1))
    second = asked("second", policy, DOCUMENT + random_prompt(45, seed=2))
    cold = Rig(policies=every_small_policy()).tokens(second)
    rig = reusing()
    assert rig.run(first)[0].usage.cached_tokens == 0
    warm = rig.run(second)[0]
    # Slabs of 64 tokens, of which the common part fills four.
    cached = 0 if policy in READS_ALL_QUERIES else 256
    assert warm.usage.cached_tokens == cached
    assert warm.tokens == cold
    progress = [event for event in warm.events if isinstance(event, ProgressEvent)]
    num_prompt = len(second.prompt_token_ids)
    assert (progress[0], progress[-1]) == (
        ProgressEvent(0, cached),
        ProgressEvent(num_prompt - cached, cached),
    )
    stats = rig.engine.stats()
    assert stats.cached_tokens_total == cached
    assert stats.prompt_tokens_total == len(first.prompt_token_ids) + num_prompt - cached
    rig.check_empty()


@pytest.mark.parametrize("chunk", [16, 64, 100])
@pytest.mark.parametrize("full_layers", [0, 2])
def test_the_same_prompt_is_not_computed_again_but_for_its_end(chunk: int, full_layers: int) -> None:
    prompt = DOCUMENT[:256]
    cold = Rig(full_layers=full_layers).tokens(asked("cold", "pqcache", prompt))
    rig = reusing(prefill_chunk=chunk, full_layers=full_layers)
    tokens, cached = [], []
    for number in range(3):
        record = rig.run(asked(f"{number}", "pqcache", prompt))[0]
        tokens.append(record.tokens)
        cached.append(record.usage.cached_tokens)
    # The last token gives the logits, so that its slab is computed.
    assert cached == [0, 192, 192]
    assert tokens == [cold] * 3
    rig.check_empty()


def test_what_another_is_still_computing_is_not_shared() -> None:
    rig = reusing()
    rig.submit(asked("first", "pqcache", DOCUMENT), asked("second", "pqcache", DOCUMENT))
    rig.drain()
    # One prompt prefills at a time: the second begins when the first is there.
    assert rig.records["second"].usage.cached_tokens == 256
    assert rig.records["second"].tokens == rig.records["first"].tokens
    rig = reusing()
    rig.submit(asked("first", "pqcache", DOCUMENT))
    rig.step(4)
    assert rig.status("first") is Status.PREFILL
    rig.engine.abort("first")
    assert rig.run(asked("second", "pqcache", DOCUMENT))[0].usage.cached_tokens == 0
    rig.check_empty()


def test_a_question_after_the_context_may_share_the_context() -> None:
    prompt = DOCUMENT + random_prompt(40, seed=3)
    cold = tokens_alone(asked("cold", "pqcache", prompt, num_prefill=300))
    rig = reusing()
    rig.run(asked("first", "pqcache", DOCUMENT + random_prompt(9, seed=4), num_prefill=300))
    warm = rig.run(asked("second", "pqcache", prompt, num_prefill=300))[0]
    assert (warm.usage.cached_tokens, warm.tokens) == (256, cold)


def test_a_store_that_came_back_empty_shares_nothing_of_before() -> None:
    rig = reusing()
    rig.run(asked("first", "pqcache", DOCUMENT))
    rig.store.reattach()
    second = rig.run(asked("second", "pqcache", DOCUMENT))[0]
    assert second.usage.cached_tokens == 0
    assert second.tokens == rig.records["first"].tokens


def test_a_chain_names_all_that_came_before() -> None:
    prefixes = Prefixes(ROOT, 16)

    def named(prompt: tuple[int, ...], **changes: object) -> tuple[bytes, ...]:
        sequence = make_sequence("a", 0, len(prompt))
        sequence.request = replace(sequence.request, prompt_token_ids=prompt, **changes)
        return prefixes.names(sequence)[0]

    prompt = tuple(range(50))
    names = named(prompt)
    assert [len(name) for name in names] == [32, 32, 32]
    assert named(prompt[:47]) == names[:2]
    assert named(prompt[:48]) == names
    other = (prompt[0] + 1, *prompt[1:])
    assert not set(named(other)) & set(names)
    assert named((*prompt[:16], 99, *prompt[17:]))[:1] == names[:1]
    assert not set(named((*prompt[:16], 99, *prompt[17:]))[1:]) & set(names)
    salted = [named(prompt, **salts) for salts in ({"prefix_salt": b"x"}, {"cache_salt": "x"})]
    assert len({*names, *salted[0], *salted[1]}) == 9
    # Token ids beyond a byte are not mixed up with several small ones.
    assert named((258, *prompt[1:])) != named((2, 1, *prompt[2:]))


def test_a_model_is_known_by_what_computes_rows() -> None:
    model = make_model()
    config = model.config
    same = [
        make_model(),
        replace(model, source="elsewhere"),
        replace(model, config=replace(config, eos_token_ids=(3,), checkpoint_dtype="bfloat16")),
    ]
    assert {model_root(each) for each in same} == {model_root(model)}
    others = [
        make_model(seed=1),
        make_model(group=2),
        replace(model, config=llama_config(replace(SHAPE, eps=1e-6))),
        replace(model, config=llama_config(replace(SHAPE, rope=replace(SHAPE.rope, theta=5e5)))),
        replace(
            model, config=config.with_attention(rope=replace(SHAPE.rope, rope_type="linear", factor=2.0))
        ),
        replace(model, config=config.with_attention(rope=replace(SHAPE.rope, frequency_factors=(2.0,) * 8))),
        replace(model, config=config.with_attention(window=64)),
    ]
    assert len({model_root(each) for each in (model, *others)}) == 1 + len(others)
    with torch.inference_mode():
        model.decoder.final_norm.weight[-1] += 1
    assert model_root(model) != model_root(make_model())


@pytest.mark.parametrize("policy", RECALL)
def test_what_was_generated_is_computed_anew_in_the_next_turn(policy: str) -> None:
    """Its rows, which fill a slab, are those of steps that attended a part of the context: not a cold run's."""
    rig = reusing()
    first = request("first", policy, 0.25, prompt=DOCUMENT[:128], max_tokens=70)
    answer = rig.tokens(first)
    turn = (*DOCUMENT[:128], *answer, *random_prompt(30, seed=5))
    second = asked("second", policy, turn)
    warm = rig.run(second)[0]
    assert warm.usage.cached_tokens == (0 if policy in READS_ALL_QUERIES else 128)
    assert warm.tokens == Rig(policies=every_small_policy()).tokens(second)
