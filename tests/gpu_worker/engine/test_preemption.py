"""Slots that running sequences give up for a waiting one: which do, how many, and that no tokens change."""

from __future__ import annotations

import pytest
import torch
from engine_rig import LAYER_HEADS, LAYOUT, NUM_KV_HEADS, NUM_LAYERS, Rig, pool_of, request, tokens_alone
from offload_rig import attached

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.request import Status
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.registry import registry
from gpu_worker.state.block_tables import physical_slots
from gpu_worker.state.sequence import Sequence

SELECTING = ["pqcache", "clusterkv"]


def blocks_of(rig: Rig, name: str) -> int:
    return -(-rig.sequence(name).num_slots // 64)


def check_places(rig: Rig, sequence: Sequence) -> None:
    """Slots and tokens name each other; sinks and window are in, where the fixed slots say, with their rows."""
    recall, seat = rig.runner.caches.recall, sequence.seat
    hot, stored = recall.hot, rig.store.rows[sequence.sequence_id]
    fixed = [*range(sequence.plan.num_sink), *range(sequence.window_begin, sequence.num_tokens)]
    for layer in range(NUM_LAYERS):
        for head in range(NUM_KV_HEADS):
            slot_of = hot.slot_of[seat, layer, head, : sequence.num_tokens]
            positions = (slot_of >= 0).nonzero().flatten()
            slots = slot_of[positions].long()
            filled = int(hot.filled[seat, layer, head])
            assert sorted(slots.tolist()) == list(range(filled))
            assert filled <= sequence.num_slots
            assert torch.equal(hot.token_of[seat, layer, head, slots].long(), positions)
            assert set(fixed) <= set(positions.tolist())
            assert 0 <= hot.hand[seat, layer, head] < sequence.num_slots
            rows = physical_slots(rig.runner.caches.block_tables.tables[seat, layer, head], slots)
            held = rig.runner.pool.rows[rows]
            assert torch.equal(
                held, torch.from_numpy(stored[layer, head, positions].copy()).view(torch.float32)
            )
            table = recall.fixed.table[seat, layer, head]
            assert sorted(table[table >= 0].tolist()) == sorted(
                rows[torch.isin(positions, torch.tensor(fixed))]
            )


# Where one layer is dense there is less to give up, and the old one is halved twice.
@pytest.mark.parametrize(("full_layers", "num_left"), [(0, 5), (1, 3)])
@pytest.mark.parametrize("policy", SELECTING)
def test_a_whole_context_becomes_a_hot_cache_for_a_newcomer(
    policy: str, full_layers: int, num_left: int
) -> None:
    old = request("old", policy, 0.2, prompt=500, max_tokens=60)
    new = request("new", "full", prompt=200, max_tokens=20)
    alone = [tokens_alone(one, full_layers=full_layers) for one in (old, new)]
    # The pool has room for the old one twice: it holds its whole context.
    rig = Rig(slot_bytes=pool_of(19), full_layers=full_layers)
    rig.submit(old)
    sequence = rig.step_to("old", Status.DECODE, 5)
    assert not sequence.can_miss
    rig.submit(request("filler", prompt=500, max_tokens=60))
    rig.step_to("filler", Status.DECODE)
    rig.submit(new)
    rig.step()
    assert sequence.can_miss
    # Of 9 blocks a head; the newcomer took 4.
    assert sequence.num_slots == num_left * 64
    used = (num_left + 9 + 4) * LAYER_HEADS + full_layers * (9 - num_left) * NUM_KV_HEADS
    assert rig.engine.stats().slot_used_tokens == used * 64 / LAYER_HEADS
    if not full_layers:
        check_places(rig, sequence)
    rig.drain()
    assert [rig.records[name].tokens for name in ("old", "new")] == alone
    assert rig.records["old"].usage.hit_rate < 1
    rig.check_empty()


@pytest.mark.parametrize("policy", SELECTING)
def test_a_hot_cache_shrinks_again_down_to_the_least(policy: str) -> None:
    old = request("old", policy, 0.1, prompt=900, max_tokens=100)
    expected = tokens_alone(old)
    rig = Rig(slot_bytes=pool_of(14), max_num_seqs=20)
    rig.submit(old)
    sequence = rig.step_to("old", Status.DECODE, 3)
    recall = rig.runner.caches.recall
    least = -(-recall.least_slots(sequence) // 64)
    sizes = [blocks_of(rig, "old")]
    for number in range(20):
        rig.submit(request(f"new {number}", prompt=10, max_tokens=54))
        before = sequence.num_slots
        rig.step()
        if "old" not in rig.runner.sequences:
            break
        if sequence.num_slots != before:
            sizes.append(blocks_of(rig, "old"))
        if sequence.can_miss:
            check_places(rig, sequence)
        rig.step(2)
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) >= 3
    assert sizes[-1] == least
    rig.drain()
    assert rig.records["old"].tokens == expected
    rig.check_empty()


def test_the_largest_gives_up_first() -> None:
    rig = Rig(slot_bytes=pool_of(20))
    rig.submit(request("large", "pqcache", 0.1, prompt=600, max_tokens=30))
    rig.step_to("large", Status.DECODE)
    rig.submit(request("small", "pqcache", 0.1, prompt=300, max_tokens=30))
    rig.step_to("small", Status.DECODE)
    small, large = blocks_of(rig, "small"), blocks_of(rig, "large")
    assert large > small > 2
    free = rig.runner.caches.num_free_slots
    rig.submit(request("new", prompt=free, max_tokens=30))
    rig.step()
    assert rig.status("new") is Status.PREFILL
    assert (blocks_of(rig, "small"), blocks_of(rig, "large")) == (small, large // 2)
    rig.drain()
    rig.check_empty()


def test_who_has_least_grows_first_and_leaves_half() -> None:
    rig = Rig(slot_bytes=pool_of(24))
    rig.submit(request("large", "pqcache", 0.1, prompt=600, max_tokens=200))
    rig.step_to("large", Status.DECODE)
    rig.submit(request("small", "pqcache", 0.1, prompt=500, max_tokens=200))
    rig.step_to("small", Status.DECODE)
    rig.submit(request("new", prompt=rig.runner.caches.num_free_slots + 300, max_tokens=10))
    rig.step_to("new", Status.DECODE)
    names = sorted(("small", "large"), key=lambda name: blocks_of(rig, name))
    least, other = (blocks_of(rig, name) for name in names)
    free = rig.runner.pool.num_free_blocks // LAYER_HEADS
    new = blocks_of(rig, "new")
    rig.engine.abort("new")
    rig.step()
    first, second = (blocks_of(rig, name) for name in names)
    most = [-(-(rig.sequence(name).capacity - 1) // 64) for name in names]
    assert first == min(most[0], least + (free + new) // 2)
    left = free + new - (first - least)
    assert second == min(most[1], other + left // 2)
    rig.drain()
    rig.check_empty()


def test_nobody_grows_while_someone_waits() -> None:
    rig = Rig(slot_bytes=pool_of(19))
    rig.submit(request("old", "pqcache", 0.2, prompt=500, max_tokens=60))
    rig.step_to("old", Status.DECODE, 5)
    rig.submit(request("new", "full", prompt=700, max_tokens=10))
    rig.step_to("new", Status.DECODE)
    sequence = rig.sequence("old")
    squeezed = sequence.num_slots
    assert sequence.can_miss
    rig.submit(request("next", "full", prompt=700, max_tokens=10))
    rig.step()
    assert rig.status("next") is Status.WAITING
    rig.engine.abort("new")
    rig.step()
    assert rig.status("next") is Status.PREFILL
    assert sequence.num_slots == squeezed
    rig.drain()
    rig.check_empty()


@pytest.mark.parametrize(
    ("name", "options", "policy"),
    [
        ("who must keep all", {}, "oracle"),
        ("who attends all", {}, "full"),
        ("a fixed hot cache", {"hot_cache": HotCacheSize(tokens=400)}, "pqcache"),
    ],
)
def test_these_give_up_nothing(name: str, options: dict, policy: str) -> None:
    rig = Rig(slot_bytes=pool_of(10), **options)
    rig.submit(request("old", policy, 0.1, prompt=400, max_tokens=40))
    sequence = rig.step_to("old", Status.DECODE)
    before = sequence.num_slots
    rig.submit(request("new", prompt=300, max_tokens=40))
    rig.step(3)
    assert rig.engine.stats().waiting == 1
    assert sequence.num_slots == before
    rig.drain()
    rig.check_empty()


def test_nothing_is_given_up_in_vain() -> None:
    rig = Rig(slot_bytes=pool_of(12))
    rig.submit(request("old", "pqcache", 0.1, prompt=300, max_tokens=40))
    rig.step_to("old", Status.DECODE)
    before = rig.sequence("old").num_slots
    rig.submit(request("new", prompt=700, max_tokens=68))
    rig.step(3)
    assert rig.engine.stats().waiting == 1
    assert rig.sequence("old").num_slots == before
    rig.drain()
    assert len(rig.records["new"].tokens) == 68
    rig.check_empty()


@pytest.mark.parametrize("transport", ["zero_copy", "shm"])
def test_rows_given_up_come_back_from_a_real_store(transport: str) -> None:
    pytest.importorskip("faiss")
    policies = registry(PQCache(num_bits=3, num_sink=4, max_iterations=3))
    old = request("old", "pqcache", 0.1, prompt=400, max_tokens=40)
    answers = []
    for slot_bytes in (pool_of(40), pool_of(13)):
        with attached(LAYOUT, transport, num_slabs=1024) as (_, client):
            rig = Rig(slot_bytes=slot_bytes, max_model_len=512, policies=policies, client=client)
            rig.submit(old)
            rig.step_to("old", Status.DECODE, 3)
            rig.submit(request("new", prompt=400, max_tokens=40))
            rig.drain()
            answers.append(rig.records["old"])
    free, under_pressure = answers
    assert under_pressure.tokens == free.tokens
    assert (free.usage.bytes_moved, free.usage.hit_rate) == (0, 1.0)
    assert under_pressure.usage.bytes_moved > 0
