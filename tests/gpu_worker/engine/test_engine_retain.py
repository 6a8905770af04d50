"""Which tokens the engine gives when layers are compressed: those of a naive decoder over what the policy keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from engine_rig import NUM_KV_HEADS, NUM_LAYERS, Rig, make_model, random_prompt, request, small_policies
from naive_decoder import greedy
from torch import Tensor

from gpu_worker.caches.retain.cache import RetainCache
from gpu_worker.policies.base import Plan, Policy, StepAttention, attend_all
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.outlier_heads.policy import OutlierHeads
from gpu_worker.policies.retain import (
    Evicted,
    Gift,
    KeptStep,
    LayerRows,
    Observing,
    Recompression,
    Retained,
    RetainPolicy,
    StepSlots,
)

PROMPT, BUDGET, STEPS = 120, 30, 50


def with_policy(policy: Policy) -> dict[str, Policy]:
    return {**small_policies(), policy.name: policy}


class HandMade(RetainPolicy):
    """Keeps two sinks, and the last of the prompt within the budget."""

    name = "hand_made"

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        if budget_tokens >= num_prompt_tokens:
            return attend_all(num_prompt_tokens, budget_tokens, 2, 0)
        return Plan(num_prompt_tokens, budget_tokens, 2, budget_tokens - 2, 0)

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        num_rows = rows.positions.shape[1]
        index = torch.cat([torch.arange(2), torch.arange(num_rows - (budget - 2), num_rows)])
        return Retained.of(rows, index.expand(rows.keys.shape[0], -1), torch.zeros(rows.positions.shape))


def test_streaming_llm_attends_sinks_and_the_last_tokens() -> None:
    def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
        return [*range(4), *range(len(keys) - 1 - (BUDGET - 4), len(keys))]

    expected = greedy(make_model(), random_prompt(PROMPT), STEPS, attended)[0]
    rig = Rig()
    one = rig.run(request("one", "streaming_llm", BUDGET, max_tokens=STEPS))[0]
    assert one.tokens == expected
    assert one.usage.attended_tokens == BUDGET
    assert (one.usage.offloaded_tokens, one.usage.bytes_moved, one.usage.hit_rate) == (0, 0, 1.0)
    rig.check_empty()


def test_rows_that_only_measuring_reads_are_no_memory_of_the_policy() -> None:
    rig = Rig()
    measured, plain = rig.run(
        request("measured", "snapkv", BUDGET, measure=True), request("plain", "snapkv", BUDGET)
    )
    assert measured.usage.attention_mass is not None
    assert measured.usage.offloaded_tokens == PROMPT + 11
    assert measured.usage.host_bytes == plain.usage.host_bytes == 0
    assert measured.usage.device_bytes == plain.usage.device_bytes > 0


class Ragged(HandMade):
    """Head 0 gives half of its window to head 1, and earlier layers keep more."""

    name = "ragged"

    def layer_budget(self, plan: Plan, layer: int, num_layers: int) -> int:
        assert num_layers == NUM_LAYERS
        return plan.budget_tokens + 4 - 4 * layer

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        num_rows = rows.positions.shape[1]
        index = torch.full((NUM_KV_HEADS, budget + 7), -1)
        for head, size in enumerate((budget - 7, budget + 7)):
            index[head, :size] = torch.cat([torch.arange(2), torch.arange(num_rows - size + 2, num_rows)])
        return Retained.of(rows, index)


def test_heads_and_layers_may_keep_unequal_numbers() -> None:
    def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
        size = BUDGET + 4 - 4 * layer + (7 if kv_head else -7)
        return [0, 1, *range(PROMPT - size + 2, len(keys))]

    expected = greedy(make_model(), random_prompt(PROMPT), STEPS, attended)[0]
    rig = Rig(policies=with_policy(Ragged()))
    assert rig.tokens(request("one", "ragged", BUDGET, max_tokens=STEPS)) == expected
    rig.check_empty()


class Doubting(HandMade):
    """While decoding, evicts the middle token that it has seen least of."""

    name = "doubting"
    evicts = True

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        if budget_tokens >= num_prompt_tokens:
            return attend_all(num_prompt_tokens, budget_tokens, 2, 3)
        return Plan(num_prompt_tokens, budget_tokens, 2, 3, budget_tokens - 5)

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        retained = super().compress(rows, plan, budget)
        return replace(retained, notes=torch.zeros(retained.positions.shape))

    def evict(self, slots: StepSlots) -> Evicted:
        assert slots.notes is not None
        return Evicted(slots.notes.masked_fill(~slots.is_evictable, float("inf")).argmin(dim=-1))

    def attention(self, step: KeptStep) -> StepAttention:
        return Observing(step, lambda notes, weights, marks: notes.add_(weights))


def test_a_policy_evicts_by_the_weights_that_it_observed() -> None:
    kept: dict[tuple[int, int], dict[int, float]] = {}

    def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
        new = len(keys) - 1
        first = [0, 1, *range(PROMPT - (BUDGET - 2), PROMPT)]
        scores = kept.setdefault((layer, kv_head), dict.fromkeys(first, 0.0))
        if len(scores) > BUDGET:
            scores.pop(min((one for one in scores if 2 <= one < new - 3), key=lambda one: scores[one]))
        scores[new] = 0.0
        weights = (queries @ keys[list(scores)].T * keys.shape[1] ** -0.5).softmax(-1).mean(0)
        for position, weight in zip(scores, weights.tolist(), strict=True):
            scores[position] += weight
        return list(scores)

    expected = greedy(make_model(), random_prompt(PROMPT), STEPS, attended)[0]
    rig = Rig(policies=with_policy(Doubting()))
    assert rig.tokens(request("one", "doubting", BUDGET, max_tokens=STEPS)) == expected
    rig.check_empty()


class Giving(HandMade):
    """Evicts the oldest of the middle, whose value goes in halves to the two that follow."""

    name = "giving"
    evicts = True

    def evict(self, slots: StepSlots) -> Evicted:
        evicted = self.oldest(slots)
        return Evicted(evicted, self.gift(slots, evicted))

    def oldest(self, slots: StepSlots) -> Tensor:
        return slots.positions.masked_fill(~slots.is_evictable, 1 << 40).argmin(dim=-1)

    def gift(self, slots: StepSlots, evicted: Tensor) -> Gift:
        position = slots.positions.gather(-1, evicted[..., None])
        takers = [(slots.positions == position + step).int().argmax(dim=-1) for step in (1, 2)]
        return Gift(torch.stack(takers, dim=-1), torch.full(evicted.shape, 0.5))


def test_the_value_of_what_is_evicted_goes_where_the_policy_says() -> None:
    """The naive decoder changes the rows themselves; the engine's pool is asked for its values."""
    rig = Rig(policies=with_policy(Giving()))
    rig.submit(request("one", "giving", BUDGET, max_tokens=STEPS))
    caches, pool = rig.runner.caches, rig.runner.pool

    def values() -> dict[int, Tensor]:
        kept = caches.retain.kept
        tables = caches.block_tables.tables
        sequence = rig.sequence("one")
        positions = kept.positions[sequence.seat, 1, 1]
        rows = {}
        for slot in range(int(kept.lengths[sequence.seat, 1, 1])):
            place = int(tables[sequence.seat, 1, 1, slot // 64]) * 64 + slot % 64
            rows[int(positions[slot])] = pool.rows[place, 16:].clone()
        return rows

    while not rig.records["one"].tokens:
        rig.step()
    before = values()
    while len(rig.records["one"].tokens) < 10:
        rig.step()
        after = values()
        gone = set(before) - set(after)
        for position in gone:
            before[position + 1] += before[position] / 2
            before[position + 2] += before[position] / 2
        assert len(gone) <= 1
        for position in set(before) & set(after):
            torch.testing.assert_close(after[position], before[position])
        before = after
    rig.drain()
    rig.check_empty()


def test_a_head_that_evicts_nothing_yet_may_name_any_slot_to_give_from() -> None:
    class Hasty(Giving):
        """Names the widest head's last slot, which a head with fewer has not."""

        name = "hasty"

        def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
            many, few = range(rows.num_tokens - 2 * budget + 10, rows.num_tokens), range(10)
            index = torch.full((NUM_KV_HEADS, len(many)), -1)
            index[0, :10], index[1] = torch.tensor(few), torch.tensor(many)
            return Retained.of(rows, index)

        def oldest(self, slots: StepSlots) -> Tensor:
            none = torch.full(slots.positions.shape[:3], slots.positions.shape[3] - 1)
            return torch.where(slots.is_evictable.any(dim=-1), super().oldest(slots), none)

    rig = Rig(policies=with_policy(Hasty()))
    # Blocks that nobody was dealt are in no table.
    rig.runner.caches.block_tables.tables.fill_(1 << 30)
    assert len(rig.tokens(request("one", "hasty", 80, prompt=300, max_tokens=20))) == 20
    rig.check_empty()


class Merging(HandMade):
    """Joins neighbours until the budget is reached, every eight tokens; doubles count double."""

    name = "merging"

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        if budget_tokens >= num_prompt_tokens:
            return attend_all(num_prompt_tokens, budget_tokens, 0, 0)
        return Plan(num_prompt_tokens, budget_tokens, 0, 0, budget_tokens, has_means=True)

    def recompression(self, plan: Plan) -> Recompression:
        return Recompression(8)

    def attention(self, step: KeptStep) -> StepAttention:
        return Chelsea().attention(step)

    def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
        positions, degrees = rows.positions, None if rows.notes is None else rows.notes.exp()
        assert (degrees is None) == (rows.num_tokens == plan.num_prompt_tokens)
        assert rows.rounds == (0 if degrees is None else (rows.num_tokens - PROMPT) // 8)
        if degrees is None:
            degrees = torch.ones(positions.shape)
        else:
            assert positions.shape[1] == budget + 8
            assert degrees.sum(dim=1).round().tolist() == [rows.num_tokens] * NUM_KV_HEADS
        keys, values = rows.keys.clone(), rows.values.clone()
        while keys.shape[1] > budget:
            # The first row goes into the second.
            total = degrees[:, :1] + degrees[:, 1:2]
            share = (degrees[:, :1] / total)[..., None]
            keys[:, 1:2] = torch.lerp(keys[:, 1:2], keys[:, :1], share)
            values[:, 1:2] = torch.lerp(values[:, 1:2], values[:, :1], share)
            degrees = torch.cat([total, degrees[:, 2:]], dim=1)
            keys, values, positions = keys[:, 1:], values[:, 1:], positions[:, 1:]
        return Retained(positions, keys, values, degrees.log(), rounds=rows.rounds + 1)


def test_means_are_weighed_by_their_degrees_and_layers_are_compressed_again() -> None:
    rig = Rig(policies=with_policy(Merging()))
    one = rig.run(request("one", "merging", BUDGET, max_tokens=STEPS))[0]
    assert len(one.tokens) == STEPS
    # It grows by 8 from 30 and falls back: 49 steps are six such rounds and one more step.
    assert one.usage.attended_tokens == pytest.approx((6 * (8 * BUDGET + 28) + BUDGET) / 49)
    rig.check_empty()


def test_a_mean_of_equal_tokens_counts_as_all_of_them() -> None:
    @dataclass(frozen=True)
    class Heavy(Merging):
        weight: float
        name = "heavy"

        def recompression(self, plan: Plan) -> None:
            return None

        def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
            index = torch.arange(rows.positions.shape[1] - budget, rows.positions.shape[1])
            kept = Retained.of(rows, index.expand(NUM_KV_HEADS, -1))
            degrees = torch.ones(kept.positions.shape)
            degrees[:, 0] = self.weight
            return Retained(kept.positions, kept.keys, kept.values, degrees.log())

    first, last = PROMPT - BUDGET, PROMPT - BUDGET + 1

    def naive(weight: int) -> list[int]:
        def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
            # Softmax over a token listed w times is softmax with log w added.
            return [first] * weight + list(range(last, len(keys)))

        return greedy(make_model(), random_prompt(PROMPT), STEPS, attended)[0]

    results = {}
    for weight in (1, 40):
        rig = Rig(policies=with_policy(Heavy(float(weight))))
        results[weight] = rig.tokens(request("one", "heavy", BUDGET, max_tokens=STEPS))
        assert results[weight] == naive(weight)
    assert results[1] != results[40]


def test_a_prompt_that_does_not_fit_uncompressed_is_served() -> None:
    # 3 layers of 2 heads: 60 blocks of 64 slots are room for 640 tokens of a head, or many budgets.
    block_bytes = 64 * 2 * 16 * 4
    rig = Rig(slot_bytes=24 * block_bytes, max_num_seqs=3)
    big = request("big", "streaming_llm", 60, prompt=900, max_tokens=20)
    assert len(rig.tokens(big)) == 20
    error = rig.run(request("dense", "full", prompt=900, max_tokens=20))[0].error
    assert "bytes of slots" in str(error)
    rig.check_empty()


def test_kept_tokens_are_measured_against_all() -> None:
    rig = Rig()
    one = rig.run(request("one", "streaming_llm", 60, max_tokens=20, measure=True))[0]
    assert one.usage.attention_mass is not None
    assert 0.1 < one.usage.attention_mass < 1.0
    assert one.usage.recall_rate is None
    selecting = rig.run(request("selecting", "snapkv", 60, max_tokens=20, measure=True))[0]
    assert 0.1 < (selecting.usage.recall_rate or 0) < 1.0
    all_of_it = rig.run(request("all", "streaming_llm", 1.0, max_tokens=20, measure=True))[0]
    assert all_of_it.usage.attention_mass == pytest.approx(1.0)
    rig.check_empty()


def test_later_layers_that_keep_more_are_compressed_again_whole() -> None:
    seen: list[tuple[int, list[int]]] = []

    class Rising(HandMade):
        """Each layer keeps five more than the one before it, head 1 six more than head 0; notes what it sees."""

        name = "rising"

        def recompression(self, plan: Plan) -> Recompression:
            return Recompression(4)

        def layer_budget(self, plan: Plan, layer: int, num_layers: int) -> int:
            return plan.budget_tokens + 5 * (layer - 1)

        def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
            seen.append((rows.layer, (rows.positions >= 0).sum(dim=1).tolist()))
            is_there = rows.positions >= 0
            kept = torch.full((NUM_KV_HEADS, budget + 3), -1)
            for head, size in enumerate((budget - 3, budget + 3)):
                kept[head, :size] = is_there[head].nonzero().flatten()[-size:]
            return Retained.of(rows, kept)

    rig = Rig(policies=with_policy(Rising()))
    rig.run(request("one", "rising", BUDGET, max_tokens=10))
    again = [
        [BUDGET + 5 * (layer - 1) - 3 + 4, BUDGET + 5 * (layer - 1) + 3 + 4] for layer in range(NUM_LAYERS)
    ]
    assert seen == [
        *((layer, [PROMPT, PROMPT]) for layer in range(NUM_LAYERS)),
        *((layer, again[layer]) for layer in range(NUM_LAYERS)),
        *((layer, again[layer]) for layer in range(NUM_LAYERS)),
    ]
    rig.check_empty()


@pytest.mark.parametrize("at_once", [1, 2, NUM_LAYERS])
def test_a_head_that_kept_little_may_keep_much_when_it_is_compressed_again(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = 20, 140
    monkeypatch.setattr(RetainCache, "_layers_at_once", lambda cache, sequence, again: at_once)

    class Swinging(HandMade):
        """When it is compressed again, the heads change places; every eight tokens."""

        name = "swinging"

        def recompression(self, plan: Plan) -> Recompression:
            return Recompression(8)

        def compress(self, rows: LayerRows, plan: Plan, budget: int) -> Retained:
            is_there = rows.positions >= 0
            sizes = (few, many) if rows.num_tokens == plan.num_prompt_tokens else (many, few)
            num_heads = len(is_there)
            kept = torch.full((num_heads, many), -1)
            for head, size in enumerate(sizes * (num_heads // NUM_KV_HEADS)):
                last = is_there[head].nonzero().flatten()[-size:]
                kept[head, : len(last)] = last
            return Retained.of(rows, kept)

    def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
        first = 300 - (few, many)[kv_head]
        for swing in range(1, (len(keys) - 1 - 300) // 8 + 1):
            first = max(first, 300 + 8 * swing - (many, few)[kv_head])
        return list(range(first, len(keys)))

    expected = greedy(make_model(), random_prompt(300), 100, attended)[0]
    rig = Rig(policies=with_policy(Swinging()))
    # Blocks that nobody was dealt are in no table.
    rig.runner.caches.block_tables.tables.fill_(1 << 30)
    assert rig.tokens(request("one", "swinging", 80, prompt=300, max_tokens=100)) == expected
    rig.check_empty()


def test_state_never_grows_beyond_the_longest_head_that_may_come() -> None:
    chelsea = Chelsea(num_sink=4, num_recent=6, chunk=16, interval_tokens=9)
    policy = OutlierHeads(chelsea, frozenset({(1, 0)}), NUM_KV_HEADS)
    rig = Rig(policies=with_policy(policy))
    one = rig.run(request("one", policy.name, 250, prompt=300, max_tokens=200))[0]
    assert len(one.tokens) == 200
    # The outlier head ends with 499 tokens.
    assert rig.runner.caches.retain.kept.width == 512


def test_who_waits_does_not_ask_its_policy_at_every_step() -> None:
    asked: list[int] = []

    class Asked(HandMade):
        name = "asked"

        def layer_budget(self, plan: Plan, layer: int, num_layers: int) -> int:
            asked.append(layer)
            return plan.budget_tokens

    block_bytes = 64 * 2 * 16 * 4
    rig = Rig(policies=with_policy(Asked()), slot_bytes=12 * block_bytes)
    rig.run(*(request(str(number), "asked", 60, max_tokens=20) for number in range(4)))
    assert sorted(asked) == sorted([*range(NUM_LAYERS)] * 4)
    rig.check_empty()
