"""StreamingLLM's shift of positions, against a decoder that rotates every key anew at its place in the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_rig import HEAD_DIM, Rig, make_model, random_prompt, request, small_policies
from naive_decoder import greedy
from torch import Tensor

from gpu_worker.kernels.prefill_attention import attend_chunk_naive
from gpu_worker.models import LoadedModel
from gpu_worker.policies.base import Policy
from gpu_worker.policies.streaming_llm.policy import StreamingLLM
from gpu_worker.state.batch import Buckets

PROMPT, BUDGET, STEPS = 120, 30, 50


def policies() -> dict[str, Policy]:
    both = [StreamingLLM(), StreamingLLM(shift_positions=True)]
    return {**small_policies(), **{policy.name: policy for policy in both}}


@torch.inference_mode()
def in_the_cache(
    model: LoadedModel,
    prompt: tuple[int, ...],
    max_tokens: int,
    budget: int,
    num_sink: int,
    num_forced: int = 0,
) -> list[int]:
    """Greedy tokens where each layer keeps its inputs, and projects those of sinks and window at 0, 1, 2, ... again at
    every step; the prompt, less what is forced, is prefilled densely."""
    decoder, config = model.decoder, model.config
    num_prefill = len(prompt) - num_forced
    hidden, inputs, group = decoder.embed(torch.tensor(prompt[:num_prefill])), [], config.group_size
    for layer in range(config.num_layers):
        inputs.append(hidden)
        query, key, value = decoder.project_qkv(layer, hidden, torch.arange(num_prefill))
        rows = torch.cat([key, value], dim=-1).transpose(0, 1)
        hidden = decoder.finish_layer(
            layer, hidden, attend_chunk_naive(query, rows, 0, decoder.attention_scale)
        )
    forced, tokens = list(prompt[num_prefill:]), []

    def chosen(state: Tensor) -> int:
        if forced:
            return forced.pop(0)
        tokens.append(int(decoder.logits(state).argmax()))
        return tokens[-1]

    token = chosen(hidden[-1:])
    while len(tokens) < max_tokens:
        hidden = decoder.embed(torch.tensor([token]))
        for layer in range(config.num_layers):
            inputs[layer] = torch.cat([inputs[layer], hidden])
            kept = torch.cat([inputs[layer][:num_sink], inputs[layer][-(budget - num_sink) - 1 :]])
            query, key, value = decoder.project_qkv(layer, kept, torch.arange(len(kept)))
            keys, values = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (key, value))
            scores = keys @ query[-1, :, :, None] * decoder.attention_scale
            attention = (scores.softmax(1) * values).sum(1)
            hidden = decoder.finish_layer(layer, hidden, attention[None])
        token = chosen(hidden)
    return tokens


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_key_has_its_position_in_the_cache(interleaved: bool) -> None:
    model = make_model()
    if interleaved:
        rope = replace(model.config.rope, interleaved=True, rotary_dim=HEAD_DIM // 2)
        model = make_model(rope=rope)
    rig = Rig(model, policies=policies())
    shifted, plain = rig.run(
        request("shifted", "streaming_llm+shift", BUDGET, max_tokens=STEPS),
        request("plain", "streaming_llm", BUDGET, max_tokens=STEPS),
    )
    assert shifted.tokens == in_the_cache(model, random_prompt(PROMPT), STEPS, BUDGET, 4)
    assert shifted.tokens != plain.tokens
    assert shifted.usage.attended_tokens == BUDGET
    rig.check_empty()


def test_sequences_with_other_numbers_of_sinks_share_a_batch_with_padding() -> None:
    rig = Rig(policies=policies())
    # As on a GPU: three sequences in four rows, and fewer as they end.
    rig.engine.caches.buckets = Buckets(is_exact=False)
    asked = {"one": (5, 90, 0), "more": (BUDGET, 130, 20), "many": (50, 110, 0)}
    records = rig.run(
        *(
            request(
                name, "streaming_llm+shift", budget, prompt=length, num_prefill=length - late, max_tokens=30
            )
            for name, (budget, length, late) in asked.items()
        ),
        request("dense", prompt=70, max_tokens=60),
    )
    for record, (budget, length, late) in zip(records, asked.values(), strict=False):
        num_sink = min(4, budget // 4)
        expected = in_the_cache(make_model(), random_prompt(length), 30, budget, num_sink, late)
        assert record.tokens == expected
    assert records[-1].tokens == greedy(make_model(), random_prompt(70), 60)[0]
    rig.check_empty()


def test_layers_that_are_dense_for_everyone_are_not_shifted() -> None:
    model = make_model()
    every = Rig(model, policies=policies(), full_layers=3)
    assert (
        every.tokens(request("one", "streaming_llm+shift", BUDGET, max_tokens=20))
        == (greedy(model, random_prompt(PROMPT), 20)[0])
    )
    first = Rig(model, policies=policies(), full_layers=1)
    assert len(first.tokens(request("one", "streaming_llm+shift", BUDGET, max_tokens=20))) == 20
    first.check_empty()
