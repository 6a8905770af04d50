"""Test sessions: listed by their owner, pinned within a limit, dropped with their bytes."""

import hashlib
from collections.abc import Callable
from itertools import accumulate

import pytest
from store_samples import LAYOUT, SLAB_BYTES, Clock

from kv_store.client import NotInStore, StoreClient, StoreFull
from kv_store.errors import PinLimit
from kv_store.sessions import SessionDirectory
from kv_store.state import StoreState

TOKENS = 32  # a slab
COLUMN_BYTES = LAYOUT.num_layers * SLAB_BYTES

Connect = Callable[..., StoreClient]


def chain(words: str) -> list[bytes]:
    """The name of each slab of a prompt that has a letter a slab."""
    return [hashlib.sha256(prefix.encode()).digest() for prefix in accumulate(words)]


def ask(client: StoreClient, words: str, session: str = "", owner: str = "me", name: str = "a") -> int:
    """A prompt of a session, left open; returns how many of its slabs were known."""
    hashes = chain(words)
    num_tokens = len(hashes) * TOKENS
    known = client.begin(name, num_tokens, hashes, owner=owner).num_shared // TOKENS
    named = (session, f"label of {session}") if session else ()
    client.seal(name, num_tokens, 0, None, hashes, *named)
    return known


def end(client: StoreClient, name: str) -> None:
    client.end(name)
    # What has ended is told before this.
    client.stats()


def asked(client: StoreClient, words: str, session: str = "", owner: str = "me") -> int:
    known = ask(client, words, session, owner)
    end(client, "a")
    return known


def test_an_owner_sees_its_own_sessions_by_their_labels(connect: Connect) -> None:
    client = connect()
    for words, session, owner in (("abc", "s1", "me"), ("abde", "s2", "me"), ("xy", "t", "them")):
        asked(client, words, session, owner)
    asked(client, "abcf", "s1")
    first, second = client.list_sessions("me")
    assert [(each.session_id, each.label) for each in (first, second)] == [
        ("s2", "label of s2"),
        ("s1", "label of s1"),
    ]
    assert (second.num_tokens, second.num_bytes) == (4 * TOKENS, 4 * COLUMN_BYTES)
    assert second.created_at <= first.created_at <= first.used_at <= second.used_at
    assert [each.session_id for each in client.list_sessions("them")] == ["t"]
    assert client.list_sessions("nobody") == ()


def test_a_dropped_session_gives_back_what_it_held_and_what_followed_on_it(connect: Connect) -> None:
    client = connect()
    base = client.stats().reserved_bytes
    # Earlier turns, another that goes on from the same beginning, and one that another session shares with it.
    for words, session in (("abc", "s"), ("abdef", "s"), ("abdg", ""), ("axy", "other"), ("zz", "")):
        asked(client, words, session)
    client.drop_session("s")
    held = client.stats().reserved_bytes - base
    assert held == (3 + 2) * COLUMN_BYTES
    assert asked(client, "abdef") == 1
    assert asked(client, "axy") == 3
    for session in ("s", "never"):
        with pytest.raises(NotInStore):
            client.drop_session(session)
    client.drop_session("other")
    assert client.stats().reserved_bytes - base == 2 * COLUMN_BYTES


def test_what_runs_on_a_dropped_session_goes_on_and_gives_its_slabs_back_at_its_end(connect: Connect) -> None:
    client = connect()
    base = client.stats().reserved_bytes
    asked(client, "abc", "s")
    assert ask(client, "abcd", name="runs") == 3
    client.drop_session("s")
    assert client.stats().reserved_bytes - base == 4 * COLUMN_BYTES
    # It decodes on, and seals a slab more.
    client.reserve("runs", 5 * TOKENS)
    client.seal("runs", 5 * TOKENS)
    assert asked(client, "q") == 0
    end(client, "runs")
    assert asked(client, "abcd") == 0
    assert client.stats().reserved_bytes - base == (4 + 1) * COLUMN_BYTES


def test_pinned_sessions_outlive_the_others_and_have_a_limit(connect: Connect) -> None:
    client = connect()
    # Of 256 slabs 64 may be pinned: 32 of each layer.
    asked(client, "p" * 30, "doc")
    asked(client, "q" * 3, "late")
    client.pin_session("doc", True)
    with pytest.raises(StoreFull, match="--arena-bytes") as refused:
        client.pin_session("late", True)
    assert refused.value.missing_bytes == 0
    asked(client, "o" * 32, "theirs", "them")
    client.pin_session("theirs", True, 60.0)
    asked(client, "r" * 20, "last")
    client.begin("big", 60 * TOKENS)
    assert [each.label for each in client.list_sessions("me")] == ["label of doc"]
    [theirs] = client.list_sessions("them")
    assert theirs.is_pinned
    assert theirs.pinned_until - theirs.used_at > 59
    # What grows past the limit holds what it held.
    end(client, "big")
    asked(client, "p" * 40, "doc")
    [doc] = client.list_sessions("me")
    assert (doc.num_tokens, doc.is_pinned, doc.pinned_until) == (30 * TOKENS, True, 0.0)
    client.pin_session("doc", False)
    asked(client, "p" * 40, "doc")
    [doc] = client.list_sessions("me")
    assert (doc.num_tokens, doc.is_pinned) == (40 * TOKENS, False)
    # A pin is no claim: a request that has no other room goes before it.
    client.begin("all", 110 * TOKENS)
    assert client.stats().num_sessions == 0


def test_sessions_and_pins_are_bounded_and_a_pin_ends_in_time(state: StoreState, clock: Clock) -> None:
    sessions = SessionDirectory(state.allocator, max_sessions=4, max_of_owner=3, clock=clock)
    slabs = state.allocator.allocate(1, 2)[0]

    def hold(*names: str) -> None:
        for name in names:
            clock.now += 1
            sessions.hold(name, (), slabs, owner=name[0])

    def names(owner: str) -> list[str]:
        return [name for name, _ in sessions.of(owner)]

    hold("a1", "a2")
    sessions.pin("a1", True, 10.0)
    hold("a3", "a4")
    # An owner's own oldest goes, but not a pinned one.
    assert names("a") == ["a1", "a3", "a4"]
    hold("b1", "b2")
    assert (names("a"), names("b")) == (["a1", "a4"], ["b1", "b2"])
    clock.now += 10
    hold("b3")
    assert (names("a"), names("b")) == (["a4"], ["b1", "b2", "b3"])
    # The same slabs are counted once, whoever shares them.
    many = state.allocator.allocate(1, 16)[0]
    for name, held in (("c1", many[:14]), ("c2", many[:14]), ("c3", many)):
        sessions.hold(name, (), held, owner="c")
    sessions.pin("c1", True)
    sessions.pin("c2", True)
    sessions.pin("c3", True)
    sessions.pin("c1", False)
    sessions.hold("c4", (), slabs, owner="c")
    with pytest.raises(PinLimit, match=r"28\.1%.* 25%"):
        sessions.pin("c4", True)
    sessions.clear()
    assert (len(sessions), int(sessions.counts.sum())) == (0, 0)
    assert state.allocator.references(slabs).tolist() == [1, 1]
