"""A kind of cache that the product does not have, in some layers of a model: a window of the last tokens.

Everything about it is in this file: what it holds, how a prompt and a step attend, and where it is put (`LayerMap`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_rig import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    Rig,
    every_small_policy,
    make_model,
    random_prompt,
    request,
)
from naive_decoder import first_best
from offload_rig import attached
from torch import Tensor

from gpu_worker.caches import Cache, GroupStep, HotCacheSize
from gpu_worker.caches.layer_map import FULL, POLICY, LayerMap
from gpu_worker.policies.base import CacheShape, PromptAttention, StepQueries
from gpu_worker.state.batch import Buckets, Group, GroupShape
from gpu_worker.state.block_tables import BlockTables, physical_slots
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool, num_blocks
from kv_store.client import Layout, RowFormat

WINDOW, SIZE = "window", 8
SECOND, FIRST_AND_LAST, MIXED = (POLICY, WINDOW, POLICY), (WINDOW, POLICY, WINDOW), (FULL, WINDOW, POLICY)
MAPS = [SECOND, FIRST_AND_LAST, MIXED, (WINDOW, FULL, WINDOW)]
LEAST = HotCacheSize(tokens=1)
PROMPT, STEPS = 120, 30


def attend(query: Tensor, rows: Tensor, is_seen: Tensor, scale: float) -> Tensor:
    """query: [T, H_q, d]. rows: [H_kv, n, 2d]. is_seen: bool [T, n], or by KV head [H_kv, 1, T, n]."""
    keys, values = rows.unsqueeze(1).split(HEAD_DIM, dim=-1)
    grouped = query.transpose(0, 1).unflatten(0, (NUM_KV_HEADS, -1))
    weights = (grouped @ keys.transpose(-1, -2) * scale).masked_fill(~is_seen, float("-inf")).softmax(-1)
    return (weights @ values).flatten(0, 1).transpose(0, 1)


class WindowOfPrompt(PromptAttention):
    def attend(self, query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
        end = begin + len(query)
        distance = torch.arange(begin, end)[:, None] - torch.arange(end)
        return attend(query, rows[:, :end], (distance >= 0) & (distance < SIZE), scale)


class WindowStep(GroupStep):
    def __init__(self, group: Group, pool: SlotPool, tables: Tensor, scale: float) -> None:
        self.group = group
        self._pool = pool
        self._scale = scale
        lanes = group.lanes
        self._window = lanes.positions[:, None] - torch.arange(SIZE)
        slots = self._window.where(self._window >= 0, -1) % SIZE
        slots = slots.where(self._window >= 0, -1)[:, None, None].expand(-1, *tables.shape[1:3], -1)
        # [B, L, H_kv, SIZE]
        self._rows = physical_slots(tables[lanes.seats], slots)
        self.new_slots = self._rows[..., 0].int()

    def attend(self, layer: int, queries: StepQueries) -> Tensor:
        outputs = []
        for query, rows, window in zip(queries.own, self._rows[:, layer], self._window, strict=True):
            if not (window >= 0).any():
                outputs.append(torch.zeros_like(query))
                continue
            held = self._pool.rows[rows[:, window >= 0]]
            is_seen = torch.ones(1, held.shape[1], dtype=torch.bool)
            outputs.append(attend(query[None], held, is_seen, self._scale)[0])
        return torch.stack(outputs)


class WindowCache(Cache):
    """Position p of each sequence is in slot p % SIZE, until the one SIZE later comes."""

    def __init__(self, shape: CacheShape, pool: SlotPool, block_tables: BlockTables) -> None:
        super().__init__(shape, block_tables)
        self._pool = pool

    def num_blocks(self, sequence: Sequence, num_free_blocks: int) -> int:
        return self.num_layers * NUM_KV_HEADS * num_blocks(SIZE)

    def admit(self, sequence: Sequence) -> None:
        self.block_tables.assign(sequence.seat, SIZE)

    def prompt_attention(self, sequence: Sequence) -> PromptAttention:
        return WindowOfPrompt()

    def store(self, sequence: Sequence, layer: int, rows: Tensor, queries: Tensor) -> None:
        positions = torch.arange(max(0, rows.shape[1] - SIZE), rows.shape[1])
        slots = (positions % SIZE).expand(NUM_KV_HEADS, -1)
        self._pool.rows[physical_slots(self.block_tables.tables[sequence.seat, layer], slots)] = rows[
            :, positions
        ]

    def group_shape(
        self, sequences: list[Sequence], num_lanes: int, num_tokens: int, buckets: Buckets
    ) -> GroupShape:
        return GroupShape(WINDOW, False, num_lanes, SIZE)

    def begin_step(self, group: Group) -> WindowStep:
        return WindowStep(group, self._pool, self.block_tables.tables, self._shape.scale)

    def count(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.meter.num_layer_steps += self.num_layers
            sequence.meter.attended_tokens += self.num_layers * min(SIZE - 1, sequence.num_tokens)


# Queries [G, d] and keys [T, d] of a step's KV head, the new token's last, to the positions that are attended.
Attended = Callable[[Tensor, Tensor], list[int]]


def everything(queries: Tensor, keys: Tensor) -> list[int]:
    return list(range(len(keys)))


def best(queries: Tensor, keys: Tensor) -> list[int]:
    """Return what the oracle attends with 30 tokens: 4 sinks, half of the other 26 recent, half by weight."""
    end = len(keys) - 1 - 13
    weights = (queries @ keys.T * HEAD_DIM**-0.5).softmax(-1).sum(0)
    return [*range(4), *first_best(weights[4:end], 13, 4), *range(end, len(keys))]


@torch.inference_mode()
def reference(names: tuple[str, ...], prompt: tuple[int, ...], attended: Attended = everything) -> list[int]:
    """Greedy tokens of a model with such layers in plain PyTorch, without slots: all rows are kept and masked."""
    decoder, tokens = make_model().decoder, list(prompt)
    past = [torch.empty(NUM_KV_HEADS, 0, 2 * HEAD_DIM) for _ in names]
    new = torch.tensor(prompt)
    while len(tokens) < len(prompt) + STEPS:
        begin, end = past[0].shape[1], past[0].shape[1] + len(new)
        positions, every = torch.arange(begin, end), torch.arange(end)
        hidden = decoder.embed(new)
        for layer, name in enumerate(names):
            query, key, value = decoder.project_qkv(layer, hidden, positions)
            past[layer] = torch.cat([past[layer], torch.cat([key, value], -1).transpose(0, 1)], dim=1)
            distance = positions[:, None] - every
            is_seen = (distance >= 0).expand(NUM_KV_HEADS, 1, -1, -1).clone()
            if name == WINDOW:
                is_seen &= distance < SIZE
            if name == POLICY and begin:
                for head, queries in enumerate(query[0].view(NUM_KV_HEADS, -1, HEAD_DIM)):
                    is_seen[head] = False
                    is_seen[head, :, :, attended(queries, past[layer][head, :, :HEAD_DIM])] = True
            output = attend(query, past[layer], is_seen, decoder.attention_scale)
            hidden = decoder.finish_layer(layer, hidden, output)
        tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
        new = torch.tensor(tokens[-1:])
    return tokens[len(prompt) :]


def windowed(names: tuple[str, ...], **options: object) -> Rig:
    layers = LayerMap.of(names, unkept=[WINDOW])
    layout = Layout(layers.num_kept, NUM_KV_HEADS, RowFormat(HEAD_DIM, "fp32"))
    return Rig(layers=layers, more_caches={WINDOW: WindowCache}, layout=layout, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", MAPS)
@pytest.mark.parametrize("chunk", [7, 500])
def test_a_model_with_windows_answers_as_in_plain_pytorch(names: tuple[str, ...], chunk: int) -> None:
    prompt = random_prompt(PROMPT)
    expected = reference(names, prompt)
    assert expected != reference((FULL,) * NUM_LAYERS, prompt)
    rig = windowed(names, prefill_chunk=chunk)
    assert rig.tokens(request("one", prompt=prompt, max_tokens=STEPS)) == expected
    # Of a prompt that is shorter than the window all is attended.
    assert rig.tokens(request("few", prompt=prompt[:3], max_tokens=STEPS)) == reference(names, prompt[:3])
    rig.check_empty()


@pytest.mark.parametrize("names", [SECOND, FIRST_AND_LAST, MIXED])
@pytest.mark.parametrize("hot_cache", [HotCacheSize(), LEAST])
def test_policies_select_in_the_layers_that_are_theirs(
    names: tuple[str, ...], hot_cache: HotCacheSize
) -> None:
    prompt = random_prompt(PROMPT)
    rig = windowed(names, hot_cache=hot_cache)
    found = rig.tokens(request("one", "oracle", 30, prompt=prompt, max_tokens=STEPS))
    assert found == reference(names, prompt, best)
    rig.check_empty()


@pytest.mark.parametrize("names", [SECOND, MIXED])
def test_the_arena_keeps_the_rows_of_other_layers_only(names: tuple[str, ...]) -> None:
    rig = windowed(names, hot_cache=LEAST)
    rig.submit(request("one", "pqcache", 30, prompt=PROMPT, max_tokens=STEPS))
    rig.step_until(lambda: len(rig.records["one"].tokens) > 5)
    sequence = rig.sequence("one")
    assert sequence.offloads
    assert sequence.can_miss
    kept = rig.runner.caches.layers.num_kept
    rig.runner.offloader.extents.seal(sequence, sequence.num_tokens)
    assert len(rig.store.sealed_at["one"]) == kept == 2
    num_bytes = sequence.num_tokens * kept * rig.store.layout.token_bytes
    assert rig.runner.caches.held_bytes(sequence)[1] == num_bytes
    rig.drain()
    assert {layer for _, layer, _ in rig.store.segments} <= set(range(kept))
    rig.check_empty()


@pytest.mark.parametrize("names", [SECOND, MIXED])
@pytest.mark.parametrize("hot_cache", [HotCacheSize(), LEAST])
def test_a_batch_of_all_families_answers_as_each_alone(
    names: tuple[str, ...], hot_cache: HotCacheSize
) -> None:
    requests = [
        request(policy, policy, budget, prompt=random_prompt(length, length), max_tokens=STEPS)
        for policy, budget, length in (
            ("full", 1.0, 33),
            ("pqcache", 30, 150),
            ("clusterkv", 0.2, 130),
            ("snapkv", 40, 100),
            ("h2o", 0.3, 90),
        )
    ]
    alone = [windowed(names, hot_cache=hot_cache).tokens(one) for one in requests]
    rig = windowed(names, hot_cache=hot_cache, max_joining=200)
    assert [record.tokens for record in rig.run(*requests)] == alone
    rig.check_empty()


@pytest.mark.parametrize(
    ("policy", "transport"), [("quest", "zero_copy"), ("quest", "shm"), ("pqcache", "grpc")]
)
def test_a_store_gives_back_the_rows_of_the_layers_that_it_keeps(policy: str, transport: str) -> None:
    """Its numbers differ from the model's and from the cache's: 0 and 1 are the layers 0 and 2, of which the policy
    serves the second."""
    asked = request("one", policy, 40, prompt=random_prompt(PROMPT), max_tokens=STEPS, measure=True)
    found = []
    for hot_cache in (HotCacheSize(), LEAST):
        with attached(Layout(2, NUM_KV_HEADS, RowFormat(HEAD_DIM, "fp32")), transport, num_slabs=64) as (
            _,
            client,
        ):
            rig = windowed(
                MIXED,
                client=client,
                hot_cache=hot_cache,
                max_model_len=256,
                policies=every_small_policy(),
            )
            found.append(rig.tokens(asked))
            usage = rig.records["one"].usage
            rig.engine.close()
    assert found[0] == found[1]
    # The other layers have nothing to find, and this one would find nothing in another's keys.
    assert usage.recall_rate is not None
    assert usage.recall_rate > 0.4
    if policy == "quest":
        assert usage.hit_rate < 1
        assert found[0] == windowed(MIXED, policies=every_small_policy()).tokens(asked)


def test_nothing_of_a_prompt_is_reused_where_a_layer_is_not_kept() -> None:
    prompt = random_prompt(200)
    rig = windowed(SECOND, reuses_prefixes=True, reads_slots=True)
    expected = reference(SECOND, prompt)
    for name in ("first", "second"):
        assert rig.tokens(request(name, prompt=prompt, max_tokens=STEPS)) == expected
        assert rig.records[name].usage.cached_tokens == 0


@pytest.mark.parametrize(
    ("names", "layout_layers", "match"),
    [
        ((POLICY, WINDOW), 1, "2 layers are mapped to caches; the model has 3"),
        ((POLICY, "ring", POLICY), 3, r"layers are mapped to \['ring'\]; give the caches"),
        (SECOND, 3, "the store keeps 3 layers, the map 2"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(names: tuple[str, ...], layout_layers: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Rig(
            layers=LayerMap.of(names, unkept=[WINDOW]),
            more_caches={WINDOW: WindowCache},
            layout=Layout(layout_layers, NUM_KV_HEADS, RowFormat(HEAD_DIM, "fp32")),
        )
