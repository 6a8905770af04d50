"""Bodies that are being received: their memory is bounded, in all and of each client, and given back on every way."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from gateway_stack import Stack, running_stack
from grpc_health.v1 import health_pb2
from waiting import PATIENCE, eventually, wait_until

from gateway import body_limits
from gateway.body_limits import BodyRoom
from gateway.errors import Overloaded, TooManyRequests
from gateway.v1 import chat_pb2 as pb

CHAT, RESPONSES, MESSAGES = (f"/v1/{name}" for name in ("chat/completions", "responses", "messages"))
COMPLETE = "/carrel.gateway.v1.Chat/Complete"
CHECK = "/grpc.health.v1.Health/Check"


async def hold(room: BodyRoom, owner: bytes, num_bytes: int, ended: asyncio.Event) -> None:
    async with room.taken(owner, num_bytes):
        await ended.wait()


def test_an_owner_has_a_quarter_and_the_others_of_its_line_wait() -> None:
    async def main() -> None:
        room, ended = BodyRoom(100), asyncio.Event()
        held = [asyncio.create_task(hold(room, b"a", 10, ended)) for _ in range(50)]
        await eventually(lambda: room.num_bytes == 20)
        async with room.taken(b"b", 20):
            assert room.num_bytes == 40
        ended.set()
        await asyncio.gather(*held)
        assert room.num_bytes == 0

    asyncio.run(main())


def test_room_that_does_not_come_free_is_an_error_that_says_whose_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_limits, "PATIENCE_S", 0.05)

    async def main() -> None:
        room = BodyRoom(100)
        async with room.taken(b"a", 25):
            with pytest.raises(TooManyRequests, match="25 is the most"):
                async with room.taken(b"a", 1):
                    pass
            async with room.taken(b"b", 25), room.taken(b"c", 25), room.taken(b"d", 25):
                with pytest.raises(Overloaded, match="try again"):
                    async with room.taken(b"e", 1):
                        pass
        assert room.num_bytes == 0

    asyncio.run(main())


def test_a_body_larger_than_all_room_is_received_alone() -> None:
    async def main() -> None:
        room, ended = BodyRoom(100), asyncio.Event()
        small = asyncio.create_task(hold(room, b"a", 10, ended))
        await eventually(lambda: room.num_bytes == 10)
        large = asyncio.create_task(hold(room, b"b", 1000, ended))
        await asyncio.sleep(0)
        # those that come later do not keep it out
        later = [asyncio.create_task(hold(room, owner, 10, ended)) for owner in (b"a", b"c")]
        await asyncio.sleep(0)
        assert room.num_bytes == 10
        ended.set()
        await asyncio.gather(small, large, *later)
        assert room.num_bytes == 0

    asyncio.run(main())


def test_whatever_comes_and_goes_no_limit_is_passed_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_limits, "PATIENCE_S", 0.01)
    chance = random.Random(7)

    async def main() -> None:
        room = BodyRoom(100)

        async def one(owner: bytes, num_bytes: int) -> None:
            try:
                async with room.taken(owner, num_bytes):
                    assert room.num_bytes <= max(100, num_bytes)
                    await asyncio.sleep(chance.random() / 200)
                    if chance.random() < 0.2:
                        raise ValueError
            except (TooManyRequests, Overloaded, ValueError):
                pass

        tasks = []
        for _ in range(600):
            tasks.append(asyncio.create_task(one(chance.choice([b"a", b"b", b"c"]), chance.randrange(150))))
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(0.001)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert room.num_bytes == 0
        async with room.taken(b"d", 100):
            pass

    asyncio.run(main())


KEYS = ("alpha", "beta")


@pytest.fixture(scope="module")
def narrow_stack(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    """A key has room for one body of 1 MiB, and its body is waited for without an end."""
    folder = tmp_path_factory.mktemp("narrow")
    options = {"max_incoming_bytes": 4 * 2**20, "body_timeout_s": PATIENCE, "header_timeout_s": PATIENCE}
    with running_stack(folder, model_dir, api_keys=KEYS, **options) as stack:
        yield stack


@contextmanager
def half_sent(stack: Stack, key: str, length: str, body: bytes = b"{") -> Iterator[socket.socket]:
    """A connection on which a body has begun."""
    address = httpx.URL(stack.url)
    with socket.create_connection((address.host, address.port), timeout=PATIENCE) as link:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        link.sendall(f"{head}Content-Type: application/json\r\n{length}\r\n\r\n".encode() + body)
        yield link


def ask(stack: Stack, key: str, route: str = CHAT) -> httpx.Response:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    body = {"input": "hi"} if route == RESPONSES else chat
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{stack.url}{route}", json=body, headers=headers, timeout=PATIENCE)


@pytest.mark.parametrize(
    "length", [f"Content-Length: {2**20}", "Transfer-Encoding: chunked"], ids=["declared", "chunked"]
)
def test_half_sent_bodies_take_room_before_they_are_read_and_give_it_back(
    narrow_stack: Stack, length: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_limits, "PATIENCE_S", 0.1)
    stack, room = narrow_stack, narrow_stack.service.bodies.room
    stack.say("the")
    body = b'4\r\n{"a"\r\n' if "chunked" in length else b"{"
    with half_sent(stack, "alpha", length, body):
        wait_until(lambda: room.num_bytes == 2**20)
        assert incoming_bytes(stack) == 2**20
        for route in (CHAT, RESPONSES):
            refused = ask(stack, "alpha", route)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "too_many_requests"
        refused = ask(stack, "alpha", MESSAGES)
        assert refused.status_code == 429
        assert (refused.json()["type"], refused.json()["error"]["type"]) == ("error", "rate_limit_error")
        # another key has room of its own
        assert ask(stack, "beta").status_code == 200
    wait_until(lambda: room.num_bytes == 0)
    assert ask(stack, "alpha").status_code == 200


def incoming_bytes(stack: Stack) -> float:
    headers = {"Authorization": f"Bearer {KEYS[1]}"}
    text = httpx.get(f"{stack.url}/metrics", headers=headers, timeout=PATIENCE).text
    (line,) = (each for each in text.splitlines() if each.startswith("carrel_gateway_incoming_body_bytes{"))
    return float(line.split()[-1])


def test_room_in_all_is_bounded(narrow_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limits, "PATIENCE_S", 0.1)
    stack, room = narrow_stack, narrow_stack.service.bodies.room
    with ExitStack() as held:
        for owner in (b"1", b"2", b"3"):
            taken = room.taken(owner, 2**20)
            run(stack, taken.__aenter__())
            held.callback(lambda taken=taken: run(stack, taken.__aexit__(None, None, None)))
        held.enter_context(half_sent(stack, "alpha", f"Content-Length: {2**20}"))
        wait_until(lambda: room.num_bytes == 4 * 2**20)
        refused = ask(stack, "beta")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        refused = ask(stack, "beta", MESSAGES)
        assert refused.json()["error"]["type"] == "overloaded_error"
    wait_until(lambda: room.num_bytes == 0)


def run(stack: Stack, work: object) -> None:
    asyncio.run_coroutine_threadsafe(work, stack.loop).result(PATIENCE)


def test_room_is_given_back_by_whatever_ends_a_body(narrow_stack: Stack) -> None:
    stack, room = narrow_stack, narrow_stack.service.bodies.room
    stack.say("the")
    headers = {"Authorization": "Bearer alpha", "Content-Type": "application/json"}
    for content, status in ((b"no json", 400), (b"{}", 400), (b"[[" * 2**15, 413), (b"x" * (2**20 + 1), 413)):
        refused = httpx.post(f"{stack.url}{CHAT}", content=content, headers=headers, timeout=PATIENCE)
        assert refused.status_code == status
        assert room.num_bytes == 0
    with half_sent(stack, "alpha", "Transfer-Encoding: chunked", b"no chunk\r\n") as link:
        assert b" 400 " in link.recv(1000)
    wait_until(lambda: room.num_bytes == 0)


def test_a_burst_of_bodies_waits_for_room_and_is_served(narrow_stack: Stack) -> None:
    stack = narrow_stack
    stack.say("the")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "user": "x" * 600_000}

    async def main() -> set[int]:
        headers = {"Authorization": "Bearer alpha"}
        async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=PATIENCE) as client:
            answers = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(12)))
        return {each.status_code for each in answers}

    assert asyncio.run(main()) == {200}


def test_a_slow_body_is_ended(tmp_path: Path, model_dir: Path) -> None:
    with (
        running_stack(tmp_path, model_dir, api_keys=KEYS, body_timeout_s=0.3) as stack,
        half_sent(stack, "alpha", "Content-Length: 99") as link,
    ):
        answer = link.recv(4096)
        assert b" 408 " in answer
        assert b"RequestTimeoutError" in answer + link.recv(4096)
        assert stack.service.bodies.room.num_bytes == 0


@contextmanager
def silent_call(stack: Stack, method: str, key: str | None, ends: bool = False) -> Iterator[grpc.Call]:
    """A call that sends no message; `ends`: and says that none comes."""
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    ended = threading.Event()

    def messages() -> Iterator[bytes]:
        if not ends:
            ended.wait()
        yield from ()

    with grpc.insecure_channel(stack.grpc_target) as channel:
        call = channel.stream_stream(method)(messages(), timeout=PATIENCE, metadata=metadata)
        try:
            yield call
        finally:
            ended.set()
            call.cancel()


@pytest.mark.parametrize(
    ("method", "key"), [(COMPLETE, "alpha"), ("/carrel.gateway.v1.Chat/ListModels", "alpha"), (CHECK, None)]
)
def test_a_call_that_ends_without_a_message_is_told_so(
    narrow_stack: Stack, method: str, key: str | None
) -> None:
    with silent_call(narrow_stack, method, key, ends=True) as call:
        with pytest.raises(grpc.RpcError, match="without a message") as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    wait_until(lambda: not narrow_stack.service.bodies.room.num_bytes)


def test_a_call_without_a_key_is_refused_before_its_message(narrow_stack: Stack) -> None:
    for ends in (False, True):
        with silent_call(narrow_stack, COMPLETE, None, ends) as call:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_calls_whose_messages_do_not_come_take_room_and_are_ended(tmp_path: Path, model_dir: Path) -> None:
    with (
        running_stack(tmp_path, model_dir, api_keys=KEYS, body_timeout_s=0.5) as stack,
        ExitStack() as held,
    ):
        calls = [
            held.enter_context(silent_call(stack, COMPLETE, "alpha")),
            held.enter_context(silent_call(stack, CHECK, None)),
        ]
        wait_until(lambda: stack.service.bodies.room.num_bytes == 4 * 2**20)
        for call in calls:
            with pytest.raises(grpc.RpcError, match="did not arrive within") as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert stack.service.bodies.room.num_bytes == 0


def test_a_burst_of_calls_waits_for_room_and_is_served(tmp_path: Path, model_dir: Path) -> None:
    with running_stack(tmp_path, model_dir, api_keys=KEYS, max_incoming_bytes=2**20) as stack:
        stack.say("the")
        metadata = (("authorization", "Bearer alpha"),)
        request = pb.ChatRequest(messages=[pb.Message(role="user", content="hi")]).SerializeToString()
        health = health_pb2.HealthCheckRequest().SerializeToString()
        with grpc.insecure_channel(stack.grpc_target) as channel:
            complete, check = channel.unary_stream(COMPLETE), channel.unary_unary(CHECK)
            calls = [complete(request, timeout=PATIENCE, metadata=metadata) for _ in range(30)]
            checks = [check.future(health, timeout=PATIENCE) for _ in range(30)]
            assert all([list(each) for each in calls])
            assert all(each.result() for each in checks)
