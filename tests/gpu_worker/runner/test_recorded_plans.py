"""A run is its plans: they could cross a pipe, and another runner answers them alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_rig import HotCacheSize, Rig, mixed_requests, pool_of, random_prompt, request
from recorded_plans import is_plain, record, replay, tokens_of

from gpu_worker.records.plans import Release, Then


def pressed() -> Rig:
    """Slots and an arena that are too small for all at once."""
    return Rig(
        slot_bytes=pool_of(14),
        capacity_tokens=700,
        hot_cache=HotCacheSize(tokens=40),
        reuses_prefixes=True,
        runs_ahead=True,
    )


@pytest.mark.parametrize("make", [Rig, pressed])
def test_another_runner_answers_the_same_plans_with_the_same_tokens(make: type[Rig]) -> None:
    rig, again = make(), make()
    plans = record(rig.runner)
    rig.run(*mixed_requests())
    assert tokens_of(replay(plans, again.runner)) == tokens_of(plans)
    assert {name: rig.records[name].tokens for name in rig.records} == tokens_of(plans)
    again.check_empty()


def test_plans_and_outcomes_are_plain_data() -> None:
    rig = pressed()
    plans = record(rig.runner)
    begins_alike = request("alike", "full", prompt=(*random_prompt(150, 2), 5), max_tokens=40)
    scored = request("scored", "full", prompt=random_prompt(90, 3))
    asked = [
        *mixed_requests(),
        begins_alike,
        replace(scored, sampling=replace(scored.sampling, prompt_logprobs=2)),
    ]
    rig.submit(*asked)
    rig.step(40)
    rig.engine.check_store()
    rig.engine.abort("b")
    rig.drain()
    assert all(is_plain(each.plan) and is_plain(each.outcome) for each in plans)
    # A pressed run has nearly all there are.
    assert len({each.verb for each in plans}) >= 15
    preempted = [one for each in plans for one in each.plan if isinstance(one, Release)]
    assert any(one.then is Then.PREEMPT for one in preempted)
