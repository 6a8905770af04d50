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


def test_who_recalls_from_the_arena_has_its_prefix_there_proven_though_it_is_read_from_slots() -> None:
    rig = Rig(reuses_prefixes=True, reads_slots=True)
    rig.run(ask("first", "full"))
    rig.store.num_corrupt = 1
    for policy, cached in (("full", 192), ("oracle", 0)):
        second = ask(policy, policy, 1)
        record = rig.run(second)[0]
        assert record.usage.cached_tokens == cached
        assert record.tokens == tokens_alone(second)
