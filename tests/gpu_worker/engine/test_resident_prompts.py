"""Known prefixes are read from slots that still hold them, and from the arena once these are others'."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_rig import Rig, pool_of, random_prompt, request, tokens_alone

from gpu_worker.records import ErrorEvent, GenerationRequest

DOCUMENT = random_prompt(230, 3)


def ask(name: str, policy: str, *more: int) -> GenerationRequest:
    budget = 1.0 if policy == "full" else 0.25
    return request(name, policy, budget, prompt=(*DOCUMENT, *more), max_tokens=9)


def poison(rig: Rig) -> None:
    """Whatever the arena has of prompts is no number any more."""
    for rows in rig.store.prefixes.values():
        rows[:] = 0xFF


@pytest.mark.parametrize("policy", ["full", "oracle", "snapkv", "chelsea"])
def test_a_second_turn_needs_nothing_of_the_arena(policy: str) -> None:
    rig = Rig(reuses_prefixes=True, reads_slots=True)
    first, second, third = (ask(f"{number}", policy, *range(40 * number)) for number in range(3))
    for one, cached in ((first, 0), (second, 192), (third, 256)):
        record = rig.run(one)[0]
        assert record.tokens == tokens_alone(one)
        assert record.usage.cached_tokens == cached
        poison(rig)
    rig.check_empty()


def test_a_prompt_that_still_runs_is_found_too() -> None:
    rig = Rig(reuses_prefixes=True, reads_slots=True)
    first = replace(ask("first", "full"), sampling=replace(ask("", "full").sampling, max_tokens=60))
    rig.submit(first)
    rig.step_until(lambda: rig.records["first"].tokens)
    poison(rig)
    second = ask("second", "full", 1, 2)
    rig.submit(second)
    rig.drain()
    assert rig.records["second"].tokens == tokens_alone(second)
    assert rig.records["first"].tokens == tokens_alone(first)


@pytest.mark.parametrize("policy", ["full", "oracle", "snapkv"])
def test_slots_that_others_took_are_read_from_the_arena(policy: str) -> None:
    # Room for a prompt and its answer, and little more.
    rig = Rig(reuses_prefixes=True, reads_slots=True, slot_bytes=pool_of(5))
    rig.run(ask("first", policy))
    rig.run(request("another", prompt=random_prompt(250, 9), max_tokens=20))
    second = ask("second", policy, 1, 2)
    record = rig.run(second)[0]
    assert record.usage.cached_tokens == 192
    assert record.tokens == tokens_alone(second)
    # Were they not, this would end so too.
    poison(rig)
    rig.run(request("again", prompt=random_prompt(250, 10), max_tokens=20))
    assert isinstance(rig.run(ask("third", policy, 1, 2, 3))[0].last, ErrorEvent)


def test_who_takes_them_while_they_are_read_changes_nothing() -> None:
    """The layers that are gone come from the arena, the others from slots."""
    rig = Rig(reuses_prefixes=True, reads_slots=True, slot_bytes=pool_of(9), prefill_chunk=32)
    rig.run(ask("first", "full"))
    second = ask("second", "full", *range(90))
    rig.submit(second)
    rig.step(2)
    other = request("other", prompt=random_prompt(180, 9), max_tokens=20)
    rig.submit(other)
    rig.drain()
    assert rig.records["second"].tokens == tokens_alone(second)
    assert rig.records["other"].tokens == tokens_alone(other)


def test_what_may_not_be_shared_is_not_found() -> None:
    rig = Rig(reuses_prefixes=True, reads_slots=True)
    rig.run(ask("first", "full"))
    poison(rig)
    for name, change in {"salt": {"cache_salt": "a"}, "caller": {"prefix_salt": b"b"}}.items():
        one = replace(ask(name, "full", 1), **change)  # type: ignore[arg-type]
        record = rig.run(one)[0]
        assert record.usage.cached_tokens == 0
        assert record.tokens == tokens_alone(ask(name, "full", 1))


def test_a_prompt_that_was_not_computed_leaves_nothing() -> None:
    rig = Rig(reuses_prefixes=True, reads_slots=True, prefill_chunk=16)
    rig.submit(ask("first", "snapkv"), ask("other", "full"))
    rig.step(3)
    rig.engine.abort("first")
    rig.engine.abort("other")
    rig.drain()
    second = ask("second", "full", 1)
    assert rig.run(second)[0].tokens == tokens_alone(second)
    rig.check_empty()


@pytest.mark.parametrize("policy", ["full", "oracle", "snapkv"])
def test_what_few_tokens_add_to_a_known_prefix_is_found_in_the_arena(policy: str) -> None:
    rig = Rig(reuses_prefixes=True)
    first, second, third = (ask(f"{number}", policy, *range(40 * number)) for number in range(3))
    for one, cached in ((first, 0), (second, 192), (third, 256)):
        record = rig.run(one)[0]
        assert record.tokens == tokens_alone(one)
        assert record.usage.cached_tokens == cached
    rig.check_empty()


def test_who_recalls_from_the_arena_has_its_prefix_there_proven_though_it_is_read_from_slots() -> None:
    rig = Rig(reuses_prefixes=True, reads_slots=True)
    rig.run(ask("first", "full"))
    rig.store.num_corrupt = 1
    for policy, cached in (("full", 192), ("oracle", 0)):
        second = ask(policy, policy, 1)
        record = rig.run(second)[0]
        assert record.usage.cached_tokens == cached
        assert record.tokens == tokens_alone(second)
