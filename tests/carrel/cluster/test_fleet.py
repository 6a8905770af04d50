"""Calls to replicas through Serve's handle, and what the router makes of what they wish."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from carrel.cluster.fleet import Fleet
from carrel.cluster.messages import Frame
from carrel.cluster.replica import warn_of_niceness
from carrel.cluster.router import WishRouter

# Serve tells the calls of HTTP requests apart by such a variable
REQUEST: ContextVar[str] = ContextVar("REQUEST", default="none")


class Response:
    """A response that is both a stream and a call that returns nothing."""

    def cancel(self) -> None:
        """Ignore it: the response has ended."""

    async def __aiter__(self) -> AsyncIterator[Frame]:
        yield Frame("a", is_last=True)

    def __await__(self) -> Any:
        return iter(())


@dataclass
class Handle:
    """A deployment's: `called` has for each call the request that it was part of, and its named arguments."""

    called: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *_: Any, **named: Any) -> Response:
        self.called.append((REQUEST.get(), named))
        return Response()


async def test_calls_of_one_request_are_calls_of_their_own_to_serve() -> None:
    handle = Handle()
    fleet = Fleet(cast(Any, handle))
    REQUEST.set("a request with choices")
    assert [frame async for frame in fleet.generate(b"", 1.0, "a", ())] == [Frame("a", is_last=True)]
    await fleet.abort("a", "r")
    assert [request for request, _ in handle.called] == ["none", "none"]
    assert [named.get("wanted") or named.get("only") for _, named in handle.called] == ["a", "a"]


def replicas(names: str) -> list[Any]:
    return [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


async def chosen(names: str, **wish: Any) -> list[set[str]]:
    """Groups of replicas in which a call with this wish is tried, the first first."""
    router = WishRouter.__new__(WishRouter)
    request: Any = SimpleNamespace(kwargs=wish, routing_context=SimpleNamespace(should_backoff=False))
    groups = await router.choose_replicas(replicas(names), request)
    assert request.routing_context.should_backoff
    return [{each.replica_id.unique_id for each in group} for group in groups]


async def test_a_request_goes_to_the_wanted_replica_and_last_to_those_that_lost_it() -> None:
    assert await chosen("abc", wanted="b", lost=()) == [{"b"}, {"a", "c"}]
    assert await chosen("abc", wanted="b", lost=("b", "c")) == [{"a"}, {"b", "c"}]
    assert await chosen("abc", wanted="gone", lost=("a",)) == [{"b", "c"}, {"a"}]


async def test_a_call_for_one_replica_only_is_never_given_to_another_that_answers_sooner() -> None:
    assert await chosen("abc", only="b") == [{"b"}]
    # it ends: nobody else knows the request
    assert await chosen("ac", only="b") == [{"a", "c"}]


def test_a_replica_that_comes_after_other_processes_says_how_to_start_ray(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_niceness(0)
        assert caplog.messages == []
        warn_of_niceness(15)
    [message] = caplog.messages
    assert "niceness 15" in message
    assert "RAY_worker_niceness=0" in message
