"""InfLLM: blocks recalled by their representatives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from policy_index import SHAPE, Tokens, candidates_of, grow, new_index, select
from torch import Tensor

from gpu_worker.policies.base import Plan
from gpu_worker.policies.infllm import blocks as infllm_blocks
from gpu_worker.policies.infllm.blocks import local_attention, representatives
from gpu_worker.policies.infllm.policy import InfLLM
from gpu_worker.policies.recall import Leaving

POLICY = InfLLM(block_size=16, repr_topk=2, num_sink=4)
HEADS, DIM = SHAPE.num_kv_heads, SHAPE.head_dim


def exact_local_attention(queries: Tensor, keys: Tensor, num_sink: int, width: int) -> Tensor:
    """[H_kv, n], a loop over queries and heads."""
    (num_heads, num_tokens, _), num_kv_heads = queries.shape, keys.shape[0]
    received = torch.zeros(num_kv_heads, num_tokens, dtype=torch.float64)
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        for last in range(num_tokens):
            window = range(max(num_sink, last - width + 1), last + 1)
            seen = [*range(min(num_sink, last + 1)), *window]
            scores = keys[kv_head, seen].double() @ queries[head, last].double() * SHAPE.scale
            weights = scores.softmax(0)[len(seen) - len(window) :]
            received[kv_head, list(window)] += weights
    return received


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("max_weights", [1, 900, 1 << 26])
def test_attention_is_received_from_queries_within_the_window(
    group: int, max_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infllm_blocks, "MAX_WEIGHTS", max_weights)
    tokens = Tokens.random(40, group, replace(SHAPE, group_size=group))
    plan = Plan(40, 25, num_sink=4, num_recent=7, num_selected=14)
    received = local_attention(tokens.queries[0], tokens.keys[0], plan, SHAPE.scale)
    exact = exact_local_attention(tokens.queries[0], tokens.keys[0], 4, 7)
    torch.testing.assert_close(received.double()[:, 4:], exact[:, 4:], atol=1e-5, rtol=1e-5)


def test_representatives_are_the_tokens_of_a_block_that_received_most() -> None:
    index, tokens = new_index(POLICY), Tokens.random(90, 0)
    plan = POLICY.plan(90, 36)
    assert grow(POLICY, index, 1, tokens, plan) == (4, 74)
    for layer in range(2):
        received = exact_local_attention(tokens.queries[layer], tokens.keys[layer], 4, 16)
        received[:, :4] = -1
        for head in range(HEADS):
            for block, first in enumerate(range(0, 90, 16)):
                best = first + received[head, first : first + 16].topk(2).indices
                mean = tokens.keys[layer, head, best].mean(dim=0)
                torch.testing.assert_close(index.keys[1, layer, head, block], mean)


@pytest.mark.parametrize("block_size", [4, 16, 128])
@pytest.mark.parametrize("repr_topk", [1, 3])
def test_of_tokens_that_received_as_much_the_later_represent_their_block(
    repr_topk: int, block_size: int
) -> None:
    num_tokens = 2 * block_size + 3
    keys = torch.randn(HEADS, num_tokens, DIM, generator=torch.Generator().manual_seed(0))
    received = torch.ones(HEADS, num_tokens)
    received[1, block_size] = 2.0
    means, counts = representatives(received, keys, repr_topk, block_size)
    ends = [block_size, 2 * block_size, num_tokens]
    expected = torch.stack([keys[:, end - repr_topk : end].mean(dim=1) for end in ends], dim=1)
    torch.testing.assert_close(means[0], expected[0])
    best = [block_size, *range(2 * block_size - repr_topk + 1, 2 * block_size)]
    torch.testing.assert_close(means[1, 1], keys[1, best].mean(dim=0))
    assert counts.tolist() == [[repr_topk] * 3] * HEADS


def needles(num_tokens: int, places: dict[int, int], channel: int) -> Tokens:
    """Small random keys; those at the places, by head, are long in a channel, where the queries just behind look."""
    tokens = Tokens.random(num_tokens, 0)
    tokens.keys.mul_(0.1)
    for head, place in places.items():
        tokens.keys[:, head, place, channel] = 30.0
        tokens.queries[:, 2 * head : 2 * head + 2, place + 1 : place + 6, channel] = 5.0
    return tokens


def test_a_block_whose_needle_was_attended_is_recalled_by_all_heads() -> None:
    index, tokens = new_index(POLICY), needles(120, {0: 37, 1: 37}, 6)
    # A louder token that no query attended represents nothing.
    tokens.keys[:, :, 70, 6] = -90.0
    tokens.keys[:, :, 71, 6] = 30.0
    tokens.queries[:, :, 70:, 6] = -5.0
    span = grow(POLICY, index, 0, tokens, POLICY.plan(120, 36))
    query = torch.zeros(1, 2 * HEADS, DIM)
    query[..., 6] = 1.0
    assert select(POLICY, index, query, {0: span}, layer=1, k=16) == [[list(range(32, 48))] * 2]


@pytest.mark.parametrize("group", [1, 3, 4])
def test_heads_choose_together_or_each_its_own(group: int) -> None:
    shape = replace(SHAPE, group_size=group)
    tokens, query = Tokens.random(150, group, shape), torch.randn(1, HEADS * group, DIM)
    for per_head in (False, True):
        policy = replace(POLICY, per_head=per_head)
        index = new_index(policy, shape)
        begin, end = grow(policy, index, 1, tokens, policy.plan(150, 36))
        scores = policy.score(index, candidates_of(query, {1: (begin, end)}, layer=1, extra=3))
        assert (scores[..., :begin] == float("-inf")).all()
        assert (scores[..., end:] == float("-inf")).all()
        for first in range(0, end, 16):
            block = index.keys[1, 1, :, first // 16].repeat_interleave(group, dim=0)
            products = (query[0] * block).sum(dim=-1).view(HEADS, group).mean(dim=1)
            expected = products if per_head else products.mean().expand(HEADS)
            for position in range(max(first, begin), min(first + 16, end)):
                torch.testing.assert_close(scores[0, :, position], expected)


def test_blocks_of_the_prompt_stay_and_decoded_tokens_all_represent_theirs() -> None:
    grown, prompt, tokens = new_index(POLICY), new_index(POLICY), Tokens.random(160, 0)
    plan = POLICY.plan(90, 36)
    start = Tokens(tokens.keys[:, :, :90], tokens.queries[:, :, :90])
    grow(POLICY, prompt, 1, start, plan)
    _, end = grow(POLICY, grown, 1, tokens, plan)
    assert end == 144
    # Five whole blocks are the prompt's. Of the sixth it has ten tokens, two of which represent.
    assert torch.equal(grown.keys[1, :, :, :5], prompt.keys[1, :, :, :5])
    decoded = tokens.keys[:, :, 90:96].sum(dim=2)
    mixed = (2 * prompt.keys[1, :, :, 5] + decoded) / 8
    torch.testing.assert_close(grown.keys[1, :, :, 5], mixed)
    for block in range(6, 9):
        mean = tokens.keys[:, :, 16 * block : 16 * block + 16].mean(dim=2)
        torch.testing.assert_close(grown.keys[1, :, :, block], mean)
    assert grown.keys[1, :, :, 9:].isnan().all()


def test_sinks_represent_no_block() -> None:
    policy = replace(POLICY, num_sink=15)
    index, tokens = new_index(policy), Tokens.random(100, 0)
    grow(policy, index, 0, tokens, policy.plan(100, 64))
    assert torch.equal(index.keys[0, :, :, 0], tokens.keys[:, :, 15])
    assert (index.counts[0, :, :, 0] == 1).all()


def test_padding_writes_nothing_on_an_unused_seat() -> None:
    index = new_index(POLICY)
    index.num_prompt_tokens.fill_(-7)
    no_token = torch.tensor([-1])
    POLICY.extend(
        index, Leaving(torch.tensor([1]), range(2), no_token, lambda: torch.zeros(1, 2, HEADS, DIM))
    )
    assert index.keys.isnan().all()
    assert (index.counts == 113).all()


def test_the_name_says_what_is_built_of_the_paper() -> None:
    assert (InfLLM().name, InfLLM(sparse_prefill=True).name) == ("infllm", "infllm+sparse")
