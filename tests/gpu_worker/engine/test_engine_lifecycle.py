"""Requests from admission to their end: room, seats, limits, aborts, and what the slots and the store hold."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from engine_rig import (
    BLOCK_BYTES,
    LAYER_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    TOKEN_BYTES,
    Rig,
    make_model,
    pool_of,
    random_prompt,
    request,
    small_policies,
    tokens_alone,
)
from naive_decoder import greedy
from waiting import PATIENCE

from gpu_worker.caches import HotCacheSize
from gpu_worker.caches.dense import DenseCache
from gpu_worker.engine.request import Status
from gpu_worker.errors import CapacityError, ConfigError, StoreUnavailable, WorkerError
from gpu_worker.policies.clusterkv.policy import ClusterIndex, ClusterKV
from gpu_worker.policies.quest.policy import Quest
from gpu_worker.policies.recall import TrainedSegment
from gpu_worker.policies.snapkv.policy import SnapKV
from gpu_worker.records import (
    CompleteEvent,
    Event,
    FinishReason,
    ProgressEvent,
    TokenEvent,
)
from gpu_worker.runner.prompts.in_progress import AnyPass
from gpu_worker.runner.prompts.layered import Prefill
from gpu_worker.runner.steps.decode import StepResult
from gpu_worker.sampling import Sampler
from gpu_worker.service.engine_thread import EngineThread
from gpu_worker.state.block_tables import physical_slots
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import BLOCK_SIZE
from kv_store.client import StoreSilent, StoreUnreachable

SELECTING = ["oracle", "pqcache", "clusterkv"]
ALL = ["full", *SELECTING]
LEAST = HotCacheSize(tokens=1)


@pytest.mark.parametrize("policy", ALL)
def test_events_come_in_order_and_say_what_was_done(policy: str) -> None:
    rig = Rig(prefill_chunk=50)
    record = rig.run(request("one", policy, 0.5, max_tokens=5))[0]
    progress = [event.computed_tokens for event in record.events if isinstance(event, ProgressEvent)]
    assert progress == sorted(progress)
    # One when the prompt is begun, and one for each chunk of each layer.
    assert len(progress) == 1 + 3 * NUM_LAYERS
    assert (progress[0], progress[-1]) == (0, 120)
    kinds = [type(event) for event in record.events]
    assert kinds == [ProgressEvent] * len(progress) + [TokenEvent] * 5 + [CompleteEvent]
    usage = record.usage
    assert record.complete.finish_reason is FinishReason.LENGTH
    assert (usage.prompt_tokens, usage.completion_tokens, usage.context_tokens) == (120, 5, 125)
    assert usage.policy == policy
    assert usage.offloaded_tokens == (0 if policy == "full" else 124)
    assert min(usage.queue_ms, usage.prefill_ms, usage.index_wait_ms, usage.decode_ms) >= 0
    stats = rig.engine.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (120, 5)
    assert (stats.requests_finished_total, stats.requests_failed_total) == (1, 0)
    assert stats.offloaded_bytes_total == usage.offloaded_tokens * TOKEN_BYTES
    rig.check_empty()


@pytest.mark.parametrize("policy", [*ALL, "snapkv"])
def test_the_memory_that_a_request_held_is_told(policy: str) -> None:
    rig = Rig(hot_cache=LEAST)
    rig.submit(request("one", policy, 30, prompt=300, max_tokens=100))
    while len(rig.records["one"].tokens) < 9:
        rig.step()
    row_bytes = BLOCK_BYTES // BLOCK_SIZE
    held = rig.engine.stats().slot_used_tokens * LAYER_HEADS * row_bytes
    rig.engine.abort("one")
    usage = rig.records["one"].usage
    assert usage.device_bytes == held > 0
    # 300 tokens and 100 more take 7 blocks of every layer and head, if all of them are kept.
    assert (usage.device_bytes == pool_of(7)) is (policy in ("full", "oracle"))
    in_arena = policy in SELECTING
    assert usage.host_bytes == (308 * TOKEN_BYTES if in_arena else 0)
    rig.check_empty()


@pytest.mark.parametrize("policy", ALL)
def test_stop_tokens_end_the_answer_unless_ignored(policy: str) -> None:
    plain = tokens_alone(request("plain", policy, 0.5, max_tokens=30))
    stop = plain[6]
    first = plain.index(stop)
    model = make_model(eos_token_ids=(stop,))
    rig = Rig(model)
    by_id, by_eos, ignoring = rig.run(
        request("id", policy, 0.5, max_tokens=30, stop=(stop,)),
        request("eos", policy, 0.5, max_tokens=30, ignore_eos=False),
        request("ignoring", policy, 0.5, max_tokens=30),
    )
    for record in (by_id, by_eos):
        assert record.tokens == plain[:first]
        assert record.complete.finish_reason is FinishReason.STOP
        assert record.complete.stop_token_id == stop
        assert record.usage.completion_tokens == first + 1
    assert ignoring.tokens == plain
    assert ignoring.complete.stop_token_id is None
    rig.check_empty()


def test_a_stop_at_the_very_first_token_leaves_nothing() -> None:
    first = tokens_alone(request("plain", max_tokens=1))[0]
    rig = Rig()
    for policy in ALL:
        record = rig.run(request(policy, policy, 0.5, stop=(first,)))[0]
        assert record.tokens == []
        assert record.complete.finish_reason is FinishReason.STOP
    rig.check_empty()


@pytest.mark.parametrize("policy", ["full", "pqcache"])
def test_a_prompt_of_100000_tokens_stops_within_a_chunk_of_its_abort(policy: str) -> None:
    chunk, length, told = 128, 100_000, threading.Event()
    rig = Rig(prefill_chunk=chunk, max_model_len=1 << 17, slot_bytes=160 << 20)
    thread = EngineThread(rig.engine, 0, on_death=lambda: None)
    events: list[Event] = []
    # Of the prompt in one layer: what is computed counts as so much of each token.
    at_abort = 0

    def sink(event: Event) -> None:
        nonlocal at_abort
        events.append(event)
        match event:
            case ProgressEvent(computed_tokens=computed) if computed >= chunk and not at_abort:
                at_abort = computed
                thread.abort("long")
            case CompleteEvent():
                told.set()

    thread.submit(request("long", policy, 0.1, prompt=length), sink)
    assert told.wait(PATIENCE)
    thread.close()
    assert at_abort < rig.engine.stats().prompt_tokens_total + 1 <= at_abort + chunk
    assert isinstance(events[-1], CompleteEvent)
    assert events[-1].finish_reason is FinishReason.ABORT
    rig.check_empty()


def test_a_request_larger_than_the_slot_pool_is_refused_with_the_remedy() -> None:
    rig = Rig(slot_bytes=pool_of(2))
    fitting, too_long = rig.run(request("fits", max_tokens=8), request("long", max_tokens=9))
    assert len(fitting.tokens) == 8
    assert isinstance(too_long.error, CapacityError)
    assert "--slot-memory" in str(too_long.error)
    assert f"{LAYER_HEADS * BLOCK_BYTES} bytes" in str(too_long.error)
    # What selects needs slots for what it attends only.
    selecting = rig.run(request("pq", "pqcache", 0.3, prompt=400, max_tokens=9))[0]
    assert len(selecting.tokens) == 9
    assert selecting.usage.hit_rate < 1
    selecting = rig.run(request("wide", "pqcache", 0.5, prompt=400, max_tokens=9))[0]
    assert isinstance(selecting.error, CapacityError)
    assert "--slot-memory" in str(selecting.error)
    rig.check_empty()


@pytest.mark.parametrize(
    ("policy", "owner", "method", "at"),
    [
        ("full", Prefill, "__init__", 1),
        ("full", DenseCache, "store", 2),
        ("snapkv", SnapKV, "compress", 1),
        ("quest", Quest, "observe_prefill", 1),
    ],
    ids=["buffers of a prompt", "a layer", "what is kept of a layer", "an index"],
)
def test_a_prompt_that_runs_out_of_memory_ends_its_own_request_only(
    policy: str, owner: type, method: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At this call of the method, which is the first request's."""
    calls, whole = itertools.count(1), getattr(owner, method)

    def failing(*arguments: object, **options: object) -> object:
        if next(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(*arguments, **options)

    monkeypatch.setattr(owner, method, failing)
    rig = Rig()
    rig.submit(request("one", policy, 0.3), request("other", max_tokens=30))
    rig.drain()
    text = str(rig.records["one"].error)
    assert "--slot-memory" in text
    assert policy == "full" or policy in text
    rig.check_answers({"one": CapacityError})
    rig.check_empty()


def test_an_engine_without_a_block_for_every_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="--slot-memory"):
        Rig(slot_bytes=pool_of(1) - 1)


def test_requests_wait_for_slots_and_get_fewer_when_fewer_are_free() -> None:
    expected = tokens_alone(request("second", "pqcache", 0.1, prompt=300, max_tokens=30))
    rig = Rig(slot_bytes=pool_of(8))
    rig.submit(
        request("first", prompt=300, max_tokens=84),
        request("second", "pqcache", 0.1, prompt=300, max_tokens=30),
    )
    rig.step_to("second", Status.DECODE, 3)
    rig.submit(request("third", prompt=100, max_tokens=28))
    rig.step(3)
    stats = rig.engine.stats()
    assert (stats.running, stats.waiting) == (2, 1)
    # 6 of 8 blocks went to the first, 2 to the second, and the third waits. The banner shows the info's number.
    assert stats.slot_used_tokens == stats.slot_capacity_tokens == 8 * BLOCK_SIZE
    assert rig.engine.info.slot_capacity_tokens == stats.slot_capacity_tokens
    rig.drain()
    assert rig.records["second"].tokens == expected
    assert rig.records["second"].usage.hit_rate < 1
    assert rig.records["third"].tokens == greedy(make_model(), random_prompt(100), 28)[0]
    rig.check_empty()


@pytest.mark.parametrize("policy", SELECTING)
def test_every_token_is_in_the_store_and_the_slots_hold_its_bytes(policy: str) -> None:
    rig = Rig(hot_cache=LEAST, tokens_per_slab=32)
    prompt = random_prompt(120)
    rig.submit(request("one", policy, 0.3, max_tokens=100), request("other", "pqcache", 0.2, max_tokens=60))
    recall = rig.runner.caches.recall
    checked = 0
    while rig.engine.has_work:
        rig.step()
        sequence = rig.runner.sequences.get("one")
        if sequence not in rig.decoding or sequence.num_tokens % 7:
            continue
        stored = rig.store.rows["one"][:, :, : sequence.num_tokens].view(np.float32)
        assert np.isfinite(stored).all()
        assert min(rig.store.sealed_at["one"]) >= sequence.num_tokens // 32 * 32
        for layer in range(NUM_LAYERS):
            for head in range(NUM_KV_HEADS):
                if sequence.can_miss:
                    slot_of = recall.hot.slot_of[sequence.seat, layer, head, : sequence.num_tokens]
                else:
                    slot_of = torch.arange(sequence.num_tokens)
                positions = (slot_of >= 0).nonzero().flatten()
                table = rig.runner.caches.block_tables.tables[sequence.seat, layer, head]
                held = rig.runner.pool.rows[physical_slots(table, slot_of[positions].long())]
                assert np.array_equal(held.numpy(), stored[layer, head, positions])
                assert positions[:4].tolist() == [0, 1, 2, 3]
                checked += len(positions)
    assert checked > 1000
    # The rows are those of a decoder that is given the same tokens.
    tokens = rig.records["one"].tokens
    whole = Rig(tokens_per_slab=32)
    whole.submit(request("whole", policy, 1.0, prompt=prompt + tuple(tokens), max_tokens=20))
    length = whole.step_to("whole", Status.DECODE, 15).num_tokens
    rows = greedy(make_model(), prompt + tuple(tokens), 20)[1]
    stored = torch.from_numpy(whole.store.rows["whole"][:, :, :length].copy()).view(torch.float32)
    torch.testing.assert_close(stored, torch.stack(rows)[:, :, :length], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("error", [StoreUnreachable, StoreSilent])
def test_a_store_lost_within_a_step_ends_who_cannot_repeat_it(
    error: type[StoreUnreachable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is silent for a moment: half of the step is done."""
    dense = request("full", "full", max_tokens=30)
    alone = tokens_alone(dense)
    rig = Rig(hot_cache=HotCacheSize(tokens=1), trains_indexes=True)
    rig.submit(
        request("kept", "streaming_llm", 30, max_tokens=30),
        request("lost", "pqcache", 40, prompt=300, max_tokens=30),
        dense,
    )
    while len(rig.decoding) < 3:
        rig.step()

    gather = rig.store.gather

    def unreachable(*args: object) -> None:
        monkeypatch.setattr(rig.store, "gather", gather)
        raise error("gone")

    monkeypatch.setattr(rig.store, "gather", unreachable)
    rig.drain()
    assert isinstance(rig.records["lost"].error, StoreUnavailable)
    # Its new token has a slot already; a second try would give it another.
    assert isinstance(rig.records["kept"].error, StoreUnavailable)
    assert rig.records["full"].tokens == alone
    rig.check_empty()


class ForgetsOnce(ClusterKV):
    """Needs more memory than there is to take over the first decoded window that is clustered."""

    has_failed = False

    def load(self, index: ClusterIndex, trained: TrainedSegment) -> None:
        # Within the layers: those before it are clustered.
        if trained.job.begin > self.num_sink and trained.layer == 1 and not ForgetsOnce.has_failed:
            ForgetsOnce.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory\nand more")
        super().load(index, trained)


@pytest.mark.parametrize("trains_indexes", [False, True])
def test_a_window_that_cannot_be_clustered_for_want_of_memory_ends_its_own_request_only(
    trains_indexes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForgetsOnce, "has_failed", False)
    policies = {
        **small_policies(),
        "clusterkv": ForgetsOnce(num_sink=4, tokens_per_cluster=10, window_size=40),
    }
    # The first to begin is the first whose window is full.
    requests = [
        request("own", "clusterkv", 40, max_tokens=60),
        request("same", "clusterkv", 30, prompt=150, max_tokens=60),
        request("other", "pqcache", 30, max_tokens=60),
        request("dense", max_tokens=60),
    ]
    alone = {one.request_id: Rig(trains_indexes=trains_indexes).tokens(one) for one in requests}
    rig = Rig(policies=policies, trains_indexes=trains_indexes)
    own, *others = rig.run(*requests)
    assert isinstance(own.error, CapacityError)
    assert "'clusterkv'" in str(own.error)
    assert "leave more with --slot-memory" in str(own.error)
    # A traceback would keep the tensors of what did not fit.
    assert own.error.__context__ is None
    # The prompt's token, and those of the window that was not clustered.
    assert own.tokens == alone["own"][: len(own.tokens)]
    assert len(own.tokens) == 41
    assert [other.tokens for other in others] == [alone[name] for name in ("same", "other", "dense")]
    rig.check_empty()
    # The seat's next request finds nothing of it.
    assert rig.tokens(requests[0]) == alone["own"]
    rig.check_empty()


def test_a_step_that_runs_out_of_memory_ends_its_requests_and_the_engine_goes_on() -> None:
    rig = Rig(max_num_seqs=3)
    policies = {"a": ("full", 1.0), "b": ("pqcache", 0.3), "c": ("snapkv", 0.3)}
    rig.submit(*(request(name, *policy, max_tokens=60) for name, policy in policies.items()))
    while not all(rig.records[name].tokens for name in "abc"):
        rig.step()
    run = rig.runner.decode.run

    def failing(sequences: list[Sequence], drawn: torch.Tensor | None = None) -> StepResult:
        rig.runner.decode.run = run  # type: ignore[method-assign]
        raise torch.OutOfMemoryError("CUDA out of memory")

    rig.runner.decode.run = failing  # type: ignore[method-assign]
    rig.drain()
    for name in "abc":
        assert isinstance(rig.records[name].error, CapacityError)
        assert "does not fit beside what is there" in str(rig.records[name].error)
    rig.check_empty()
    assert rig.tokens(request("next", "pqcache", 0.3)) == tokens_alone(request("next", "pqcache", 0.3))
    rig.check_empty()


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_tokens_that_cannot_be_drawn_for_want_of_memory_end_their_requests_and_the_engine_goes_on(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prompts, and after a step."""
    rig, names = Rig(), ("a", "b")
    waits = request("waits", prompt=300)
    rig.submit(*(request(name, "pqcache", 0.3, max_tokens=60) for name in names))
    if num_tokens:
        rig.step_until(lambda: all(len(rig.records[name].tokens) >= num_tokens for name in names))
    rig.submit(waits)
    with monkeypatch.context() as patch:

        def failing(*arguments: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(Sampler, "begin", failing)
        rig.step_until(lambda: all(rig.records[name].is_over for name in names))
    for name in names:
        assert isinstance(rig.records[name].error, CapacityError)
        assert "does not fit beside what is there" in str(rig.records[name].error)
    rig.drain()
    assert rig.records["waits"].tokens == tokens_alone(waits)
    rig.check_empty()


def test_a_stream_has_its_token_while_the_iterations_prompts_are_still_queued() -> None:
    rig = Rig(prefill_chunk=16, itl_seconds=60.0)
    rig.submit(request("stream", "full", prompt=random_prompt(9, 1), max_tokens=8))
    rig.step_until(lambda: bool(rig.records["stream"].tokens))
    rig.engine.step()
    prefills, seen = rig.runner.prefills, list[int]()
    begin = prefills.begin

    def noted(sequences: list[Sequence]) -> AnyPass:
        begun = begin(sequences)
        advance = begun.advance

        def noting(wait: bool) -> list[tuple[Sequence, WorkerError]]:
            seen.append(len(rig.records["stream"].tokens))
            return advance(wait)

        begun.advance = noting  # type: ignore[method-assign]
        return begun

    prefills.begin = noted  # type: ignore[method-assign]
    rig.submit(request("long", "full", prompt=random_prompt(70, 2)))
    before = len(rig.records["stream"].tokens)
    rig.engine.step()
    assert len(seen) > 2
    assert seen == [before] + [before + 1] * (len(seen) - 1)
    rig.drain()
