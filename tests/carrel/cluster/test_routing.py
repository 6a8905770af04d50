"""Where requests go: their session's replica, that which was given most of a prompt before, else the least loaded."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from carrel.cluster.routing import (
    BLOCK_TOKENS,
    MAX_BLOCKS,
    PrefixMap,
    Route,
    Routing,
    prompt_chain,
    session_link,
)

DOCUMENT = list(range(1000))


def links_of(token_ids: Sequence[int], caller: bytes = b"", cache_salt: str = "") -> tuple[bytes, ...]:
    return prompt_chain(caller, token_ids, cache_salt)


def test_a_chain_has_a_link_for_each_whole_block_and_follows_every_token() -> None:
    chain = links_of(DOCUMENT)
    assert len(chain) == len(set(chain)) == 1000 // BLOCK_TOKENS
    changed = [*DOCUMENT]
    changed[BLOCK_TOKENS * 3] += 1
    assert [a == b for a, b in zip(chain, links_of(changed), strict=True)][:5] == [True] * 3 + [False] * 2
    assert links_of(DOCUMENT[: BLOCK_TOKENS - 1]) == ()
    assert len(links_of(range(BLOCK_TOKENS * (MAX_BLOCKS + 5)))) == MAX_BLOCKS


def test_callers_and_salts_share_no_link() -> None:
    chains = [
        links_of(DOCUMENT, caller, salt) for caller in (b"", b"a" * 32, b"b" * 32) for salt in ("", "s")
    ]
    assert len({link for chain in chains for link in chain}) == 6 * len(chains[0])


def test_the_longest_known_part_decides() -> None:
    known = PrefixMap(100)
    known.record(links_of(DOCUMENT[:500]), "a")
    known.record(links_of(DOCUMENT), "b")
    assert known.find(links_of(DOCUMENT[:700] + [0] * 300), {"a", "b"}) == ("b", 700 // BLOCK_TOKENS)
    assert known.find(links_of(DOCUMENT), {"a"}) is None
    assert known.find(links_of([7] * 500), {"a", "b"}) is None
    known.forget("b")
    assert known.find(links_of(DOCUMENT), {"a", "b"}) is None


def test_what_is_forgotten_first_is_the_end_of_what_was_used_longest_ago() -> None:
    old, new = links_of(DOCUMENT[:256]), links_of([9] * 256)
    known = PrefixMap(6)
    known.record(old, "a")
    known.record(new, "b")
    assert known.find(old, {"a", "b"}) == ("a", 2)
    assert known.find(new, {"a", "b"}) == ("b", 4)


def routing(has_affinity: bool = True, max_lead: int = 2, max_requests: int = 100) -> Routing:
    return Routing(max_requests, has_affinity, max_lead, random.Random(0))


def test_unknown_prompts_spread_evenly_and_known_ones_stay() -> None:
    routes = routing(max_lead=100)
    placed = {}
    for number in range(12):
        links = links_of([number] * 200)
        route = routes.choose(links, ["a", "b", "c"])
        assert route is not None
        assert route.num_tokens == 0
        routes.taken(route, links, route.replica)
        placed[number] = route.replica
    assert sorted(placed.values()) == ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    for number, replica in placed.items():
        assert routes.choose(links_of([number] * 200), ["a", "b", "c"]) == Route(replica, 192)


def test_prompts_alike_that_come_together_stay_together_until_their_holder_is_busier_by_the_lead() -> None:
    routes = routing(max_lead=2)
    chosen = [routes.choose(links_of(DOCUMENT), ["a", "b"]) for _ in range(4)]
    names = [route.replica for route in chosen if route]
    assert names[:3] == [names[0]] * 3
    assert names[3] != names[0]


def test_another_replica_may_take_a_request_and_then_holds_its_prompt() -> None:
    routes, links = routing(), links_of(DOCUMENT)
    route = routes.choose(links, ["a"])
    assert route is not None
    routes.taken(route, links, "b")
    assert (routes.num_running("a"), routes.num_running("b")) == (0, 1)
    again = routes.choose(links, ["a", "b"])
    assert again == Route("b", 960)
    routes.taken(again, links, "b")
    routes.ended("b")
    routes.ended("b")
    assert routes.num_running("b") == 0
    assert routes.counts() == {"by_prefix": 1, "by_load": 1, "prefix_tokens": 960}


def test_a_replica_that_is_gone_holds_nothing_and_nobody_is_no_route() -> None:
    routes, links = routing(), links_of(DOCUMENT)
    assert routes.choose(links, []) is None
    routes.choose(links, ["a"])
    routes.forget("a")
    assert routes.choose(links, ["a", "b"]) == Route("b")
    give(routes, links, ["c"], b"talk")
    routes.forget("c")
    assert give(routes, links_of([3] * 200), ["c"], b"talk") == Route("c")


def give(routes: Routing, links: Sequence[bytes], replicas: Sequence[str], session: bytes = b"") -> Route:
    """Choose, and let the chosen one take it."""
    route = routes.choose(links, replicas, session)
    assert route is not None
    routes.taken(route, links, route.replica, session)
    return route


def test_a_session_has_a_name_of_its_caller_only() -> None:
    links = {session_link(caller, name) for caller in (b"", b"a" * 32, b"b" * 32) for name in ("one", "two")}
    assert len(links) == 6
    assert session_link(b"a" * 32, "one") == session_link(b"a" * 32, "one")
    assert session_link(b"a" * 32, "") == b""


def test_a_session_stays_however_busy_its_replica_is_and_whatever_its_prompt_is() -> None:
    routes, session = routing(max_lead=2), session_link(b"key", "talk")
    home = give(routes, links_of(DOCUMENT), ["a", "b"], session).replica
    other = "b" if home == "a" else "a"
    # another user's, with the same document: the other replica holds its prompt last
    for _ in range(3):
        give(routes, links_of(DOCUMENT), [other])
    for turn in range(6):
        route = give(routes, links_of([turn] * 200), ["a", "b"], session)
        assert (route.replica, route.by_session) == (home, True)
    assert routes.counts()["by_session"] == 6
    # the name of another caller's session is another session
    least = min(("a", "b"), key=routes.num_running)
    assert give(routes, links_of([77] * 200), ["a", "b"], session_link(b"other", "talk")).replica == least


@pytest.mark.parametrize("why", ["full", "draining", "lost"])
def test_a_session_leaves_a_replica_that_cannot_take_it_and_stays_where_it_went(why: str) -> None:
    routes, session = routing(max_lead=100, max_requests=2), session_link(b"", "talk")
    links = links_of(DOCUMENT)
    assert give(routes, links, ["a"], session).replica == "a"
    if why == "full":
        give(routes, links_of([1] * 200), ["a"])
    if why == "lost":
        routes.forget("a")
    there = ["a", "b"] if why == "full" else ["b"]
    assert give(routes, links, there, session) == Route("b")
    routes.ended("a")
    assert give(routes, links, ["a", "b"], session) == Route("b", 960, by_session=True)


def test_without_affinity_neither_prompts_nor_sessions_count() -> None:
    routes, session = routing(has_affinity=False), session_link(b"", "talk")
    given = [give(routes, links_of(DOCUMENT), ["a", "b"], session) for _ in range(4)]
    assert sorted(route.replica for route in given) == ["a", "a", "b", "b"]
