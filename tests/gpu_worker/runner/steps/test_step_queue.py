"""Decode steps that are queued before the tokens of the step before are taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_rig import LAYOUT, Rig, make_model, pool_of, random_prompt, request, tokens_alone
from offload_rig import attached

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.request import Status
from gpu_worker.records import CompleteEvent, FinishReason, GenerationRequest, SamplingParams
from gpu_worker.runner.steps.decode import StepResult
from gpu_worker.sampling import Sampler, SamplerState
from gpu_worker.state.lane_inputs import NUM_FIELDS, drawn_at, fill_drawn
from gpu_worker.state.sequence import Sequence


def sampled(name: str, policy: str = "full", **params: object) -> GenerationRequest:
    one = request(name, policy, 0.3, prompt=random_prompt(30, len(name)), max_tokens=20)
    return replace(one, sampling=replace(one.sampling, **params))  # type: ignore[arg-type]


def steps_before_tokens(rig: Rig, name: str) -> list[int]:
    """Record, for each step of a request, how many of its tokens were emitted when the step was queued."""
    found: list[int] = []

    def note(result: StepResult) -> None:
        if name in {sequence.sequence_id for sequence in result.sequences}:
            found.append(len(rig.records[name].tokens))

    rig.runner.decode.watch = note
    return found


def test_drawn_tokens_are_put_where_the_table_names_them() -> None:
    table = torch.arange(NUM_FIELDS * 4).view(NUM_FIELDS, 4)
    table[0] = torch.tensor([drawn_at(2), 7, drawn_at(0), 0])
    rest = table[1:].clone()
    fill_drawn(table, torch.tensor([11, 12, 13]))
    assert table[0].tolist() == [13, 7, 11, 0]
    assert torch.equal(table[1:], rest)


def test_a_token_that_follows_one_on_its_way_is_the_one_that_is_drawn_once_that_is_known() -> None:
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(0))
    state = SamplerState(SamplingParams(temperature=1.0, seed=3), (1, 2), 97, (), "a")
    ahead, known = [], []
    for _ in range(5):
        ahead.append(Sampler().begin(logits, [state], num_coming=1).take()[0])
        state.append(4)
        known.append(Sampler().sample(logits, [state])[0])
    assert ahead == known
    assert len({event.token_id for event in known if event}) > 1


AHEAD, AS_IT_IS = [1, *range(1, 19)], [*range(1, 20)]


@pytest.mark.parametrize("policy", ["full", "snapkv"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_next_step_is_queued_before_the_tokens_of_this_one_are_taken(
    policy: str, temperature: float
) -> None:
    one = sampled("one", policy, temperature=temperature, seed=5)
    expected = tokens_alone(one)
    for runs_ahead in (False, True):
        rig = Rig(runs_ahead=runs_ahead)
        told = steps_before_tokens(rig, "one")
        assert rig.tokens(one) == expected
        # The token after the prompt is there; the last one needs no step.
        assert told == (AHEAD if runs_ahead else AS_IT_IS)
        rig.check_empty()


@pytest.mark.parametrize("policy", ["pqcache", "clusterkv", "bitkeys"])
@pytest.mark.parametrize("hot_cache", [HotCacheSize(), HotCacheSize(tokens=1)])
def test_who_recalls_and_is_fully_resident_has_steps_queued_ahead(
    policy: str, hot_cache: HotCacheSize
) -> None:
    one = request("one", policy, 0.3, prompt=150, max_tokens=20)
    told: dict[bool, list[int]] = {}
    tokens: dict[bool, list[int]] = {}
    for runs_ahead in (False, True):
        with attached(LAYOUT, "zero_copy", num_slabs=64) as (_, client):
            rig = Rig(client=client, hot_cache=hot_cache, max_model_len=256, runs_ahead=runs_ahead)
            told[runs_ahead] = steps_before_tokens(rig, "one")
            tokens[runs_ahead] = rig.tokens(one)
            rig.engine.close()
    assert tokens[True] == tokens[False]
    assert told[False] == AS_IT_IS
    # Whoever misses rows has them fetched by what the host counts.
    assert told[True] == (AHEAD if hot_cache == HotCacheSize() else AS_IT_IS)


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"min_tokens": 30, "stop_token_ids": (3,)}],
)
def test_nothing_is_queued_ahead_where_a_token_follows_from_those_before(params: dict[str, object]) -> None:
    one = sampled("one", **params)
    rig = Rig(runs_ahead=True)
    told = steps_before_tokens(rig, "one")
    assert rig.tokens(one) == tokens_alone(one)
    assert told == AS_IT_IS


def test_an_answer_that_ends_with_a_token_on_its_way_takes_part_once_more_in_vain() -> None:
    model = make_model(eos_token_ids=())
    ends, goes_on = sampled("ends"), sampled("goes on")
    alone = {one.request_id: Rig(model).tokens(one) for one in (ends, goes_on)}
    stop = next(token for token in alone["ends"][4:] if token not in alone["ends"][:4])
    length = alone["ends"].index(stop)
    ends = replace(ends, sampling=replace(ends.sampling, stop_token_ids=(stop,)))
    rig = Rig(model, runs_ahead=True, max_num_seqs=2)
    told = steps_before_tokens(rig, "ends")
    rig.submit(ends, goes_on)
    rig.step_until(lambda: rig.records["ends"].is_over)
    assert rig.records["ends"].tokens == alone["ends"][:length]
    match rig.records["ends"].last:
        case CompleteEvent(finish_reason=reason, usage=usage, stop_token_id=token):
            assert (reason, token, usage.completion_tokens) == (FinishReason.STOP, stop, length + 1)
        case other:
            raise AssertionError(other)
    assert len(told) == length + 1
    # Its seat is another's at once.
    next_one = sampled("next one")
    rig.submit(next_one)
    rig.drain()
    assert rig.records["goes on"].tokens == alone["goes on"]
    assert rig.records["next one"].tokens == tokens_alone(next_one)
    rig.check_empty()


def test_who_is_aborted_beside_a_step_on_its_way_leaves_nothing() -> None:
    rig = Rig(runs_ahead=True)
    gone, stays = sampled("gone", "pqcache"), sampled("stays", "pqcache")
    rig.submit(gone, stays)
    rig.step_until(lambda: len(rig.records["gone"].tokens) == 5)
    rig.engine.abort("gone")
    rig.drain()
    assert rig.records["gone"].tokens == tokens_alone(gone)[:5]
    assert rig.records["stays"].tokens == tokens_alone(stays)
    rig.check_empty()


def test_a_prompt_that_comes_waits_for_no_more_than_the_step_on_its_way() -> None:
    rig = Rig(runs_ahead=True, itl_seconds=60.0)
    first, second = sampled("first"), sampled("second")
    rig.submit(first)
    rig.step_until(lambda: len(rig.records["first"].tokens) == 4)
    rig.submit(second)
    rig.step()
    assert rig.status("second") is not Status.WAITING
    assert len(rig.records["first"].tokens) == 5
    rig.drain()
    for one in (first, second):
        assert rig.records[one.request_id].tokens == tokens_alone(one)
    rig.check_empty()


def test_slots_that_run_out_beside_a_step_on_its_way_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.state.sequence.AHEAD", 1)
    asked = [sampled(name, max_tokens=90) for name in ("a", "bb", "ccc")]
    rig = Rig(runs_ahead=True, slot_bytes=pool_of(4), max_num_seqs=3)
    rig.submit(*asked)
    rig.drain()
    assert rig.engine.stats().preemptions_total > 0
    for one in asked:
        assert rig.records[one.request_id].tokens == tokens_alone(one)
    rig.check_empty()


def test_a_step_that_fails_ahead_loses_no_token_of_the_step_before() -> None:
    one = sampled("one")
    rig = Rig(runs_ahead=True)
    rig.submit(one)
    rig.step_until(lambda: len(rig.records["one"].tokens) == 5)
    run = rig.runner.decode.run

    def failing(sequences: list[Sequence], drawn: torch.Tensor | None = None) -> StepResult:
        rig.runner.decode.run = run  # type: ignore[method-assign]
        assert drawn is not None
        raise torch.OutOfMemoryError("CUDA out of memory")

    rig.runner.decode.run = failing  # type: ignore[method-assign]
    rig.drain()
    assert rig.records["one"].error is not None
    assert rig.records["one"].tokens == tokens_alone(one)[:6]
    rig.check_empty()
