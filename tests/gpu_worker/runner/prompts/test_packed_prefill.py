"""Short prompts that are computed together: each answers as if it were alone, pays its share, and ends alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_rig import NUM_LAYERS, Rig, every_small_policy, random_prompt, request

from gpu_worker.caches.dense import DenseCache
from gpu_worker.device import Mark
from gpu_worker.engine.request import Request, Status
from gpu_worker.errors import CapacityError, PrefixLost
from gpu_worker.records import CompleteEvent, FinishReason, GenerationRequest, ProgressEvent
from gpu_worker.state.sequence import Sequence

CHUNK = 300
SEEN_BY_ALL = random_prompt(128, seed=40)


def short_ones() -> list[GenerationRequest]:
    """Return prompts of unequal length, policy and protocol that fit a chunk together."""
    return [
        request("a", "full", prompt=random_prompt(33, 1)),
        request("b", "pqcache", 0.25, prompt=random_prompt(80, 2)),
        request("c", "snapkv", 20, prompt=random_prompt(61, 3)),
        request("d", "clusterkv", 1.0, prompt=random_prompt(1, 4)),
        request("e", "h2o", 15, prompt=random_prompt(50, 5), num_prefill=41),
        request("f", "pqcache", 30, prompt=random_prompt(64, 6), measure=True),
    ]


def packing(**options: object) -> Rig:
    return Rig(prefill_chunk=CHUNK, max_joining=CHUNK, **options)


def alone(one: GenerationRequest) -> list[int]:
    return packing().tokens(one)


def begun(*requests: GenerationRequest, **options: object) -> Rig:
    """After the first quantum of prompts that are computed together."""
    rig = packing(**options)
    rig.submit(*requests)
    rig.step()
    assert list(rig.runner.prefills) == [rig.sequence(one.request_id) for one in requests]
    assert len(set(rig.runner.prefills.values())) == 1
    return rig


@pytest.mark.parametrize("full_layers", [0, 1])
@pytest.mark.parametrize("trains_indexes", [False, True])
def test_each_answers_as_if_it_were_alone(full_layers: int, trains_indexes: bool) -> None:
    options = {"full_layers": full_layers, "trains_indexes": trains_indexes}
    requests = short_ones()
    expected = [packing(**options).tokens(one) for one in requests]
    rig = begun(*requests, **options)
    rig.drain()
    for one, tokens in zip(requests, expected, strict=True):
        record = rig.records[one.request_id]
        assert record.tokens == tokens
        progress = [event.computed_tokens for event in record.events if isinstance(event, ProgressEvent)]
        num_prefill = one.num_prefill_tokens or len(one.prompt_token_ids)
        assert progress == [done * num_prefill // NUM_LAYERS for done in range(NUM_LAYERS + 1)]
    rig.check_empty()


@pytest.mark.parametrize("policy", sorted(name for name in every_small_policy() if "+" not in name))
def test_a_policy_sees_its_own_prompt_only(policy: str) -> None:
    one = request("one", policy, 20, prompt=random_prompt(90, 1), max_tokens=4)
    expected = packing(policies=every_small_policy()).tokens(one)
    others = [request(name, prompt=random_prompt(70, ord(name)), max_tokens=4) for name in "xy"]
    rig = begun(others[0], one, others[1], policies=every_small_policy())
    rig.drain()
    assert rig.records["one"].tokens == expected
    rig.check_empty()


def test_no_more_are_computed_together_than_a_chunk_has_room_for() -> None:
    rig = packing()
    requests = [request(f"r{number}", prompt=random_prompt(90, number), max_tokens=2) for number in range(7)]
    rig.submit(*requests)
    rig.step()
    assert [sequence.sequence_id for sequence in rig.runner.prefills] == ["r0", "r1", "r2"]
    rig.step(NUM_LAYERS)
    assert [sequence.sequence_id for sequence in rig.runner.prefills] == ["r3", "r4", "r5"]
    rig.drain()
    assert [rig.records[one.request_id].tokens for one in requests] == [alone(one) for one in requests]
    rig.check_empty()


def test_each_is_charged_for_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers share the device by what they are charged."""
    rig = packing()
    rig.run(request("measured", max_tokens=1))
    charged: dict[str, float] = defaultdict(float)

    def serve(one: Request, seconds: float) -> None:
        charged[one.request_id] += seconds

    monkeypatch.setattr(rig.engine.scheduler, "serve", serve)
    rig.submit(request("half", prompt=100), request("fifth", prompt=40), request("rest", prompt=60))
    rig.drain()
    total = sum(charged.values())
    assert total > 0
    shares = {name: seconds / total for name, seconds in charged.items()}
    assert shares == pytest.approx({"half": 0.5, "fifth": 0.2, "rest": 0.3})


def test_only_a_prompt_of_few_tokens_joins_another() -> None:
    lengths = {"first": 90, "few": 40, "many": 41, "last": 40}
    requests = [request(name, prompt=length, max_tokens=2) for name, length in lengths.items()]
    rig = Rig(prefill_chunk=CHUNK, max_joining=40)
    rig.submit(*requests)
    rig.step()
    # Nobody overtakes the one that does not join.
    assert [sequence.sequence_id for sequence in rig.runner.prefills] == ["first", "few"]
    rig.drain()
    rig.check_empty()


def test_who_finds_no_seat_is_not_among_them() -> None:
    rig = packing(max_num_seqs=2)
    rig.submit(*short_ones())
    rig.step()
    assert [sequence.sequence_id for sequence in rig.runner.prefills] == ["a", "b"]
    rig.drain()
    assert [record.tokens for record in rig.records.values()] == [alone(one) for one in short_ones()]
    rig.check_empty()


def test_a_long_prompt_in_progress_is_overtaken_by_all_of_them_together() -> None:
    long, requests = request("long", "pqcache", 0.3, prompt=1000), short_ones()
    expected = alone(long)
    rig = packing(stretch=1e6)
    rig.submit(long)
    rig.step_to("long", Status.PREFILL)
    rig.step(4)
    rig.submit(*requests)
    rig.step()
    assert len(rig.runner.prefills) == 1 + len(requests)
    assert len(set(rig.runner.prefills.values())) == 2
    rig.step_until(
        lambda: all(rig.records[one.request_id].tokens for one in requests if one.request_id != "e")
    )
    assert rig.status("long") is Status.PREFILL
    rig.drain()
    assert rig.records["long"].tokens == expected
    for one in requests:
        assert rig.records[one.request_id].tokens == alone(one)
    rig.check_empty()


@pytest.mark.parametrize("name", "abcdef")
def test_one_that_is_aborted_leaves_the_others_alone(name: str) -> None:
    requests = short_ones()
    rig = begun(*requests)
    rig.engine.abort(name)
    rig.drain()
    last = rig.records[name].last
    assert isinstance(last, CompleteEvent)
    assert last.finish_reason is FinishReason.ABORT
    for one in requests:
        if one.request_id != name:
            assert rig.records[one.request_id].tokens == alone(one)
    rig.check_empty()


def test_all_that_are_aborted_leave_nothing() -> None:
    rig = begun(*short_ones())
    for name in "abcdef":
        rig.engine.abort(name)
    rig.check_empty()
    assert not rig.engine.has_work


def fails_to_store(name: str, layer: int) -> Callable[..., None]:
    store = DenseCache.store

    def failing(cache: DenseCache, sequence: Sequence, of: int, *rows: torch.Tensor) -> None:
        if sequence.sequence_id == name and of == layer:
            raise torch.OutOfMemoryError("CUDA out of memory")
        store(cache, sequence, of, *rows)

    return failing


@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
def test_one_that_does_not_fit_leaves_the_others_alone(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = short_ones()
    expected = {one.request_id: alone(one) for one in requests}
    rig = packing()
    monkeypatch.setattr(DenseCache, "store", fails_to_store("a", layer))
    rig.submit(*requests)
    rig.drain()
    error = rig.records["a"].error
    assert isinstance(error, CapacityError)
    assert "the prompt does not fit" in str(error)
    # A traceback would keep what the others need.
    assert error.__traceback__ is error.__context__ is None
    assert {name: rig.records[name].tokens for name in "bcdef"} == {name: expected[name] for name in "bcdef"}
    rig.check_empty()


def test_a_pass_that_does_not_fit_ends_who_shares_it() -> None:
    rig = begun(*short_ones())
    decoder = rig.model.decoder
    finish_layer = decoder.finish_layer

    def failing(*args: object) -> torch.Tensor:
        decoder.finish_layer = finish_layer
        raise torch.OutOfMemoryError("CUDA out of memory")

    decoder.finish_layer = failing
    rig.step()
    assert all(isinstance(rig.records[name].error, CapacityError) for name in "abcdef")
    rig.check_empty()
    assert rig.tokens(request("next")) == alone(request("next"))


def test_a_known_prefix_is_read_for_one_of_them() -> None:
    known = request("known", "pqcache", 20, prompt=SEEN_BY_ALL + random_prompt(37, 7))
    new = request("new", "pqcache", 20, prompt=random_prompt(70, 8))
    expected = alone(known), alone(new)
    for order in (known, new), (new, known):
        rig = packing(reuses_prefixes=True)
        rig.run(request("first", "pqcache", 20, prompt=SEEN_BY_ALL, max_tokens=1))
        rig.submit(*order)
        rig.step()
        assert len(set(rig.runner.prefills.values())) == 1
        assert len(rig.runner.prefills) == 2
        rig.drain()
        assert rig.records["known"].usage.cached_tokens == 128
        assert (rig.records["known"].tokens, rig.records["new"].tokens) == expected
        rig.check_empty()


def test_who_begins_like_another_waits_for_its_rows() -> None:
    requests = [
        replace(request(name, "pqcache", 20, prompt=SEEN_BY_ALL + random_prompt(9, number)), prefix_salt=salt)
        for number, (name, salt) in enumerate([("first", b"me"), ("mine", b"me"), ("theirs", b"them")])
    ]
    rig = packing(reuses_prefixes=True)
    rig.submit(*requests)
    rig.drain()
    assert [rig.records[one.request_id].usage.cached_tokens for one in requests] == [0, 128, 0]
    rig = begun(requests[0], requests[2], reuses_prefixes=True)
    rig.drain()
    rig.check_empty()


def test_a_prompt_that_is_attended_in_part_is_computed_alone() -> None:
    sparse = request("sparse", "infllm+sparse", 40, prompt=random_prompt(160, 1))
    other = request("other", prompt=random_prompt(110, 2))
    expected = packing(policies=every_small_policy()).tokens(sparse)
    for order in (sparse, other), (other, sparse):
        rig = packing(policies=every_small_policy())
        rig.submit(*order)
        rig.step()
        assert [sequence.sequence_id for sequence in rig.runner.prefills] == [order[0].request_id]
        rig.drain()
        assert (rig.records["sparse"].tokens, rig.records["other"].tokens) == (expected, alone(other))
        rig.check_empty()


def test_one_whose_known_prefix_is_lost_is_computed_anew_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = request("known", prompt=SEEN_BY_ALL + random_prompt(37, 7))
    new = request("new", prompt=random_prompt(70, 8))
    rig = packing(reuses_prefixes=True)
    rig.run(request("first", prompt=SEEN_BY_ALL, max_tokens=1))
    offloader = rig.runner.offloader
    load_layer = offloader.load_layer

    def lost(sequence: Sequence, layer: int, *rest: object) -> Mark:
        if layer < NUM_LAYERS - 1:
            return load_layer(sequence, layer, *rest)
        monkeypatch.undo()
        raise PrefixLost("gone")

    monkeypatch.setattr(offloader, "load_layer", lost)
    rig.submit(known, new)
    rig.step()
    assert len(set(rig.runner.prefills.values())) == 1
    rig.drain()
    assert [rig.records[one.request_id].tokens for one in (known, new)] == [alone(known), alone(new)]
    rig.check_empty()
