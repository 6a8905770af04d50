"""A request that says where its beginning may be known: fetched if it can be, computed if it cannot."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from engine_rig import Rig, random_prompt
from test_moved_prefix import PER_SLAB, asked, hosts

from gpu_worker.store.prefix_mover import PrefixMover


def mover(rig: Rig) -> PrefixMover:
    found = rig.engine.prefix_mover
    assert found is not None
    return found


def test_a_prefix_is_fetched_from_the_source_and_read_instead_of_computed() -> None:
    with hosts(2) as [(there, _, earlier), (_, _, later)]:
        first, second = asked("first", "pqcache", 1), asked("second", "pqcache", 2)
        earlier.run(first)
        following = replace(second, prefix_source=there.target)
        assert mover(later).fetch(following) == 4 * PER_SLAB
        warm = later.run(following)[0]
        assert warm.usage.cached_tokens == 4 * PER_SLAB
        assert warm.tokens == earlier.tokens(second)


def test_a_source_that_fails_costs_nothing_but_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with hosts(1) as [(_, _, rig)]:
        one = asked("one", "pqcache", 1)
        with caplog.at_level(logging.WARNING):
            for source in ("unix:/nowhere/at/all", "nonsense"):
                assert mover(rig).fetch(replace(one, prefix_source=source)) == 0
        assert ["request one is computed" in record.getMessage() for record in caplog.records] == [True, True]
        # Neither tokens nor hashes are told.
        assert str(one.prompt_token_ids[0:3])[1:-1] not in caplog.text
        assert rig.run(one)[0].usage.cached_tokens == 0


@pytest.mark.parametrize("policy", ["full", "snapkv", "infinigen"])
def test_nobody_is_asked_for_what_a_policy_could_not_use(policy: str) -> None:
    with hosts(1) as [(_, _, rig)]:
        pulled: list[object] = []
        mover(rig)._client.pull_prefix = lambda *asked: pulled.append(asked)  # type: ignore[method-assign,assignment]
        assert mover(rig).fetch(replace(asked("one", policy, 1), prefix_source="unix:/x")) == 0
        short = replace(asked("two", "pqcache", 1), prompt_token_ids=random_prompt(PER_SLAB))
        assert mover(rig).fetch(replace(short, prefix_source="unix:/x")) == 0
        assert not pulled


def test_an_engine_that_shares_nothing_moves_nothing() -> None:
    assert Rig().engine.prefix_mover is None
