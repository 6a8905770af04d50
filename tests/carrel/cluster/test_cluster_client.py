"""Many replicas as one worker: what is lost is tried elsewhere while nothing was answered, and told otherwise."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable

import grpc
import pytest
from fake_fleet import COMPLETE, INFO, FakeFleet, Step, answering, replicas, stats, token
from waiting import PATIENCE

from carrel.cluster.census import Census, ClusterMetrics
from carrel.cluster.client import ClusterWorkerClient
from carrel.cluster.messages import Failure, Frame, ReplicaLost, Report
from carrel.cluster.replica import relay
from carrel.cluster.routing import Routing
from carrel.cluster.sums import all_stores, all_workers
from carrel.process.request_context import RequestContext, working_for
from carrel.process.trace_context import TraceContext
from gateway.errors import InvalidRequest, Overloaded, StoreUnavailable, WorkerUnavailable
from gpu_worker.v1 import gpu_worker_pb2 as pb


def request(**values: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        **{"request_id": "r1", "prompt_token_ids": range(200), "prefix_salt": b"caller", **values}
    )


def endless(name: str) -> list[Step]:
    return [Frame(name), Frame(name, (token(1),)), 600.0]


def answers(name: str) -> list[Step]:
    return answering(name, token(1), COMPLETE)


class Client:
    """A client with its census taken."""

    def __init__(self, fleet: FakeFleet, max_requests: int = 8, silence_s: float = PATIENCE) -> None:
        self.fleet = fleet
        self.routing = Routing(max_requests, True, rng=random.Random(0))
        self.census = Census(fleet, self.routing.forget)
        self.worker = ClusterWorkerClient(fleet, self.census, self.routing, silence_s)

    async def events(self) -> list[pb.GenerateResponse]:
        await self.census.take()
        async with asyncio.timeout(PATIENCE):
            return [event async for event in self.worker.generate(request(), 60.0)]


def tokens(events: list[pb.GenerateResponse]) -> list[int]:
    return [event.token.token_id for event in events if event.HasField("token")]


async def test_a_request_runs_on_one_replica_and_the_next_of_its_prompt_too() -> None:
    client = Client(FakeFleet(replicas("a", "b"), lambda name: answering(name, token(1), token(2), COMPLETE)))
    first = await client.events()
    assert tokens(first) == [1, 2]
    assert first[-1].HasField("complete")
    for _ in range(5):
        await client.events()
    assert len({wanted for wanted, _ in client.fleet.asked}) == 1
    assert client.routing.counts()["by_prefix"] == 5
    assert {client.routing.num_running(name) for name in "ab"} == {0}


@pytest.mark.parametrize("has_begun", [False, True], ids=["before it took the request", "after"])
async def test_a_request_that_nothing_was_answered_to_goes_to_another_replica(has_begun: bool) -> None:
    lost: list[str] = []

    def script(name: str) -> list[Step]:
        if not lost:
            lost.append(name)
            return [*([Frame(name)] if has_begun else []), ReplicaLost()]
        return answers(name)

    client = Client(FakeFleet(replicas("a", "b"), script))
    assert tokens(await client.events()) == [1]
    (first, _), (second, avoided) = client.fleet.asked
    assert {first, second} == {"a", "b"}
    assert avoided == (first,)
    # until it reports again
    assert client.census.serving() == (second,)
    await client.census.take()
    assert set(client.census.serving()) == {"a", "b"}


async def test_a_stream_that_has_begun_ends_with_an_error() -> None:
    client = Client(
        FakeFleet(replicas("a", "b"), lambda name: [Frame(name), Frame(name, (token(1),)), ReplicaLost()])
    )
    with pytest.raises(WorkerUnavailable, match="lost"):
        await client.events()
    assert len(client.fleet.asked) == 1


@pytest.mark.parametrize(
    ("script", "error"), [(endless, "lost"), (lambda name: [600.0], None)], ids=["in a stream", "before it"]
)
async def test_a_silent_replica_is_lost(script: Callable[[str], list[Step]], error: str | None) -> None:
    client = Client(FakeFleet(replicas("a"), script), silence_s=0.05)
    with pytest.raises(WorkerUnavailable, match=error):
        await client.events()
    assert set(client.fleet.closed) == {"a"}
    assert client.routing.num_running("a") == 0


async def test_what_is_beyond_the_replicas_most_is_refused_at_once() -> None:
    client = Client(FakeFleet(replicas("a", "b"), endless), max_requests=1)
    await client.census.take()
    running = [client.worker.generate(request(), 60.0) for _ in range(2)]
    async with asyncio.timeout(PATIENCE):
        for stream in running:
            await anext(stream)
        with pytest.raises(Overloaded) as raised:
            await client.events()
        assert raised.value.retry_after_s
        await running[0].aclose()
        again = client.worker.generate(request(), 60.0)
        await anext(again)
        for stream in (again, running[1]):
            await stream.aclose()


async def test_replicas_that_cannot_be_asked_are_taken_for_what_they_said_last() -> None:
    class Fleet(FakeFleet):
        is_deaf = False

        async def reports(self) -> tuple[Report, ...]:
            if self.is_deaf:
                raise ReplicaLost
            return await super().reports()

    fleet = Fleet(replicas("a"), answers)
    client = Client(fleet)
    await client.census.take()
    fleet.is_deaf = True
    assert tokens(await client.events()) == [1]


async def test_nobody_there_is_told_at_once() -> None:
    client = Client(FakeFleet({}, lambda name: []))
    with pytest.raises(WorkerUnavailable, match="No replica"):
        await client.events()
    with pytest.raises(WorkerUnavailable):
        await client.worker.is_serving()
    with pytest.raises(WorkerUnavailable):
        await client.worker.stats()


@pytest.mark.parametrize(
    ("failure", "error", "num_asked"),
    [
        (Failure("INVALID_ARGUMENT", "too long", "messages", "context_length_exceeded"), InvalidRequest, 1),
        (Failure("RESOURCE_EXHAUSTED", "the queue is full"), Overloaded, 1),
        # as a replica that is lost
        (Failure("UNAVAILABLE"), WorkerUnavailable, 2),
    ],
)
async def test_what_a_worker_refuses_is_told_as_one_machine_tells_it(
    failure: Failure, error: type[Exception], num_asked: int
) -> None:
    client = Client(FakeFleet(replicas("a", "b"), lambda name: answering(name, failure=failure)))
    with pytest.raises(error, match=failure.details or None):
        await client.events()
    assert len({wanted for wanted, _ in client.fleet.asked}) == len(client.fleet.asked) == num_asked


async def test_closing_ends_the_request_and_abort_reaches_its_replica() -> None:
    client = Client(FakeFleet(replicas("a"), endless))
    await client.census.take()
    stream = client.worker.generate(request(), 60.0)
    async with asyncio.timeout(PATIENCE):
        await anext(stream)
        await client.worker.abort("r1")
        await client.worker.abort("unknown")
        await stream.aclose()
    assert client.fleet.aborted == [("a", "r1")]
    assert client.fleet.closed == ["a"]
    assert client.routing.num_running("a") == 0


async def test_who_hears_of_a_requests_end_finds_its_place_free() -> None:
    """Else a session's next turn, sent at once, would be computed elsewhere where the replica was full."""
    client = Client(FakeFleet(replicas("a"), answers), max_requests=1)
    await client.census.take()
    stream = client.worker.generate(request(), 60.0)
    async with asyncio.timeout(PATIENCE):
        while not (await anext(stream)).HasField("complete"):
            assert client.routing.num_running("a") == 1
        assert client.routing.num_running("a") == 0
        following = client.worker.generate(request(request_id="r2"), 60.0)
        assert tokens([event async for event in following]) == [1]
        await stream.aclose()
    assert client.routing.num_running("a") == 0


async def test_a_replica_that_missed_a_report_is_counted_once() -> None:
    both = replicas("a", "b", running=2, prompt_tokens_total=10)
    fleet = FakeFleet(both, lambda name: [])
    client = Client(fleet)
    for known, total in (both, 20), ({"a": both["a"]}, 20), (both, 20):
        fleet.known = known
        await client.census.take()
        assert (await client.worker.stats()).prompt_tokens_total == total


async def test_all_replicas_are_counted_as_one_and_counters_never_fall() -> None:
    fleet = FakeFleet(replicas("a", "b", running=2, prompt_tokens_total=10), lambda name: [])
    client = Client(fleet)
    await client.census.take()
    assert await client.worker.info() == INFO
    total = await client.worker.stats()
    assert (total.running, total.prompt_tokens_total, total.store_reachable) == (4, 20, True)
    fleet.known = {
        "a": Report("a", "n", True, INFO, stats(running=1, prompt_tokens_total=12, store_reachable=False))
    }
    await client.census.take()
    total = await client.worker.stats()
    assert (total.running, total.prompt_tokens_total, total.store_reachable) == (1, 22, False)
    text = ClusterMetrics(client.census, client.routing).render().decode()
    assert 'carrel_cluster_replicas{state="serving"} 1.0' in text
    assert 'carrel_cluster_replica_running{node="n",replica="a"} 1.0' in text


async def test_a_session_whose_replica_is_full_is_computed_on_another_and_stays_there() -> None:
    client = Client(FakeFleet(replicas("a", "b"), endless), max_requests=1)
    await client.census.take()
    asked = {"prompt_token_ids": range(1000), "session_id": "talk"}
    first, second = (client.worker.generate(request(request_id=name, **asked), 60.0) for name in ("r1", "r2"))
    async with asyncio.timeout(PATIENCE):
        await anext(first)
        await anext(second)
        (home, _), (other, _) = client.fleet.asked
        assert {home, other} == {"a", "b"}
        await first.aclose()
        await second.aclose()
        third = client.worker.generate(request(session_id="talk", prompt_token_ids=[5] * 200), 60.0)
        await anext(third)
        await third.aclose()
    assert client.fleet.asked[2][0] == other
    text = ClusterMetrics(client.census, client.routing).render().decode()
    assert 'carrel_cluster_routed_requests_total{by="session"} 1.0' in text


async def test_a_replica_that_reports_no_more_gets_nothing_and_is_forgotten() -> None:
    client = Client(FakeFleet(replicas("a"), endless))
    await client.census.take()
    asked = {"prompt_token_ids": range(1000), "session_id": "talk"}
    draining = client.worker.generate(request(**asked), 60.0)
    async with asyncio.timeout(PATIENCE):
        await anext(draining)
        client.fleet.known = replicas("b")
        await client.census.take()
        following = client.worker.generate(request(request_id="r2", **asked), 60.0)
        await anext(following)
        assert [wanted for wanted, _ in client.fleet.asked] == ["a", "b"]
        await draining.aclose()
        await following.aclose()
    assert client.routing.counts()["by_session"] == 0


async def numbers(count: int, pause_s: float = 0.0) -> AsyncGenerator[bytes, None]:
    for number in range(count):
        if pause_s:
            await asyncio.sleep(pause_s)
        yield bytes([number])


async def test_frames_carry_what_has_gathered_and_say_at_once_who_speaks() -> None:
    async with asyncio.timeout(PATIENCE):
        frames = [frame async for frame in relay(numbers(200), "a")]
    assert frames[0] == Frame("a")
    assert b"".join(event for frame in frames for event in frame.events) == bytes(range(200))
    assert [frame.is_last for frame in frames].count(True) == 1
    assert frames[-1].is_last
    assert len(frames) < 100


async def test_a_silent_worker_still_gives_signs_of_life() -> None:
    frames = relay(numbers(1, pause_s=600.0), "a", beat_s=0.01)
    async with asyncio.timeout(PATIENCE):
        assert [await anext(frames) for _ in range(4)] == [Frame("a")] * 4
        await frames.aclose()


async def test_how_a_call_failed_comes_with_the_last_frame() -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        yield b"x"
        metadata = grpc.aio.Metadata(("carrel-param", "prompt"))
        raise grpc.aio.AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), metadata, "no")

    async with asyncio.timeout(PATIENCE):
        *_, last = [frame async for frame in relay(failing(), "a")]
    assert last.is_last
    assert last.failure == Failure("INVALID_ARGUMENT", "no", "prompt", None)


async def test_sessions_are_those_of_all_replicas_and_a_change_reaches_each() -> None:
    client = Client(FakeFleet(replicas("a", "b"), lambda name: []))

    def listed(*sessions: tuple[str, int, float]) -> bytes:
        made = [pb.Session(session_id=name, tokens=tokens, last_used_at=at) for name, tokens, at in sessions]
        return pb.ListSessionsResponse(sessions=made, slab_tokens=64).SerializeToString()

    # one went on elsewhere
    client.fleet.replies = (listed(("s", 64, 1.0), ("t", 64, 2.0)), listed(("s", 128, 3.0)))
    reply = await client.worker.list_sessions(pb.ListSessionsRequest(prefix_salt=b"me"))
    assert [(each.session_id, each.tokens) for each in reply.sessions] == [("t", 64), ("s", 128)]
    assert reply.slab_tokens == 64

    found, missing = (pb.DropSessionResponse(found=each).SerializeToString() for each in (True, False))
    drop = pb.DropSessionRequest(prefix_salt=b"me", session_id="s")
    for replies, expected in (((missing, found), True), ((missing, missing), False)):
        client.fleet.replies = replies
        assert (await client.worker.drop_session(drop)).found is expected
    assert client.fleet.told[-1] == ("DropSession", drop.SerializeToString())

    limit = Failure("INVALID_ARGUMENT", "too much", "pinned", "pin_limit")
    away = Failure("UNAVAILABLE", "no answer", code="store_unavailable")
    for failed, error in (
        (limit, InvalidRequest),
        (away, StoreUnavailable),
        (Failure("DEADLINE_EXCEEDED"), WorkerUnavailable),
        (None, WorkerUnavailable),
    ):
        client.fleet.replies = () if failed is None else (found, failed)
        with pytest.raises(error):
            await client.worker.pin_session(pb.PinSessionRequest(session_id="s", pinned=True))


async def test_the_stores_of_all_replicas_are_told_as_one() -> None:
    client = Client(FakeFleet(replicas("a", "b"), lambda name: []))

    def told(*calls: pb.StoreCalls) -> bytes:
        return pb.StoreStatsResponse(arena_bytes=8, call_bounds=[0.5], calls=calls).SerializeToString()

    begin = pb.StoreCalls(method="Begin", seconds=0.5, counts=[1, 0], codes={"OK": 1})
    slow = pb.StoreCalls(method="Begin", seconds=2, counts=[0, 1], codes={"NOT_FOUND": 1})
    seal = pb.StoreCalls(method="Seal", counts=[3, 0], codes={"OK": 3})
    client.fleet.replies = (told(begin), told(slow, seal))
    both = pb.StoreCalls(method="Begin", seconds=2.5, counts=[1, 1], codes={"OK": 1, "NOT_FOUND": 1})
    expected = pb.StoreStatsResponse(arena_bytes=16, call_bounds=[0.5], calls=[both, seal])
    assert await client.worker.store_stats() == expected


def test_times_of_all_replicas_are_added_up_of_those_too_that_are_gone() -> None:
    def told(*counts: int) -> pb.StatsResponse:
        histogram = pb.Histogram(bounds=[0.5], counts=counts, sum=0.5)
        return pb.StatsResponse(
            running=1,
            offload_seconds=histogram,
            decode_stall_seconds={"rows": histogram},
            fallbacks_total={"recompute": 2},
        )

    gone, other = told(1, 0), told(2, 3)
    both = pb.Histogram(bounds=[0.5], counts=[3, 3], sum=1.0)
    total = all_workers([other], [gone, pb.StatsResponse(), other])
    assert total.running == 1
    assert total.offload_seconds == both
    assert dict(total.decode_stall_seconds) == {"rows": both}
    assert dict(total.fallbacks_total) == {"recompute": 4}
    assert not total.gather_seconds.counts
    stores = (pb.StoreStatsResponse(gather_seconds=each.offload_seconds) for each in (gone, other))
    assert all_stores(stores).gather_seconds == both


async def test_a_requests_trace_goes_on_to_its_replica() -> None:
    client = Client(FakeFleet(replicas("a"), answers))
    await client.events()
    trace = TraceContext("a" * 32, "b" * 16)
    with working_for(RequestContext("r1", trace)):
        await client.events()
    assert client.fleet.metadata == [(), (("traceparent", str(trace)),)]
