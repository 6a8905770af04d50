"""Connections are bounded, nobody's take all of them while another wants one, and a refusal can always be said."""

from __future__ import annotations

import asyncio
import errno
import random
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import grpc
import httpx
import pytest
from certificates import sign_oneself
from gateway_stack import Stack, running_stack
from waiting import PATIENCE, wait_until

from gateway.config import OTHER_DESCRIPTORS, GatewayConfig
from gateway.rest import server
from gateway.rest.seats import Seat, Seats
from gateway.rest.server import MOST_REFUSED, Acceptor

KEYS = ("alpha", "beta", "gamma")
CHAT = "/v1/chat/completions"


def taken(seats: Seats, owner: bytes) -> Seat:
    seat = seats.take(owner)
    assert seat is not None
    seat.transport = Mock(asyncio.Transport)
    return seat


def test_who_has_most_that_may_be_closed_loses_one_and_what_is_idle_goes_first() -> None:
    seats = Seats(4)
    many = [taken(seats, b"many") for _ in range(3)]
    one = taken(seats, b"one")
    for seat in many[:2]:
        seat.receive()
    assert taken(seats, b"new").is_taken
    assert [each.is_taken for each in (*many, one)] == [True, True, False, True]
    # its body has been sent for longest
    assert taken(seats, b"newer").is_taken
    assert [each.is_taken for each in (*many, one)] == [False, True, False, True]
    many[0].transport.write.assert_called_once()
    assert b" 503 " in many[0].transport.write.call_args.args[0]


def test_its_own_bodies_keep_an_owner_out_and_what_is_served_stays() -> None:
    seats = Seats(3)
    held = [taken(seats, b"a") for _ in range(3)]
    for seat in held:
        seat.receive()
    assert seats.take(b"a") is None
    newcomer = taken(seats, b"b")
    newcomer.serve()
    for seat in held[1:]:
        seat.serve()
    assert seats.take(b"c") is None
    newcomer.wait()
    assert seats.take(b"c") is not None


def test_a_key_owns_its_connections_from_wherever_they_come() -> None:
    seats = Seats(3)
    held = [taken(seats, address) for address in (b"1", b"2", b"3")]
    for seat in held:
        seat.receive()
        seat.belong(b"key")
    assert seats.take(b"1") is not None
    assert not held[0].is_taken


def test_whatever_comes_and_goes_seats_are_counted() -> None:
    chance, seats = random.Random(3), Seats(20)
    held: list[Seat] = []
    for _ in range(3000):
        seat = seats.take(chance.choice([b"a", b"b", b"c"]))
        if seat is not None:
            seat.transport = Mock(asyncio.Transport)
            held.append(seat)
        for each in chance.choices(held, k=3):
            chance.choice([each.wait, each.receive, each.serve, each.leave, partial(each.belong, b"d")])()
        assert seats.num_taken == sum(each.is_taken for each in held) <= 20
    for each in held:
        each.leave()
    assert seats.num_taken == 0
    assert all(seats.take(b"e") for _ in range(20))


def connect(stack: Stack) -> socket.socket:
    address = httpx.URL(stack.url)
    return socket.create_connection((address.host, address.port), timeout=PATIENCE)


@contextmanager
def half_sent_bodies(stack: Stack, key: str, count: int) -> Iterator[list[socket.socket]]:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    with ExitStack() as held:
        links = []
        for number in range(1, count + 1):
            links.append(held.enter_context(connect(stack)))
            links[-1].sendall(
                f"{head}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{{".encode()
            )
            wait_until(lambda number=number: stack.service.bodies.room.num_bytes == 99 * number)
        yield links


def ask(stack: Stack, key: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{stack.url}{CHAT}", json=body, headers=headers, timeout=PATIENCE)


def test_half_sent_bodies_of_a_key_give_way_to_another(tmp_path: Path, model_dir: Path) -> None:
    options = {"body_timeout_s": PATIENCE, "header_timeout_s": PATIENCE, "max_connections": 8}
    with running_stack(tmp_path, model_dir, api_keys=KEYS, **options) as stack:
        stack.say("the")
        with half_sent_bodies(stack, "alpha", 8) as links:
            for _ in range(3):
                assert ask(stack, "beta").status_code == 200
            assert links[0].recv(100).startswith(b"HTTP/1.1 503")
            # the others are not disturbed
            links[-1].setblocking(False)
            with pytest.raises(BlockingIOError):
                links[-1].recv(1)
        wait_until(lambda: stack.service.bodies.room.num_bytes == 0)


def test_silent_tls_handshakes_have_seats_and_an_end(tmp_path: Path, model_dir: Path) -> None:
    key, certificate = sign_oneself(tmp_path)
    options = {"ssl_keyfile": key, "ssl_certfile": certificate, "max_connections": 4}
    with (
        running_stack(tmp_path, model_dir, header_timeout_s=PATIENCE, **options) as stack,
        ExitStack() as held,
    ):
        links = [held.enter_context(connect(stack)) for _ in range(4)]
        url = stack.url.replace("http:", "https:")
        assert httpx.get(f"{url}/version", verify=False, timeout=PATIENCE).status_code == 200
        assert links[0].recv(1) == b""
    with running_stack(tmp_path, model_dir, header_timeout_s=0.3, **options) as stack, connect(stack) as link:
        assert link.recv(1) == b""


def test_so_many_refusals_are_said_at_once(tmp_path: Path, model_dir: Path) -> None:
    with running_stack(tmp_path, model_dir, max_connections=1) as stack, ExitStack() as held:
        stack.say("the fox", hang_at=1)
        http = held.enter_context(httpx.Client(base_url=stack.url, timeout=PATIENCE))
        body = {"prompt": "a", "stream": True}
        held.enter_context(http.stream("POST", "/v1/completions", json=body))
        links = [held.enter_context(connect(stack)) for _ in range(MOST_REFUSED)]
        for link in links:
            # it is not lost to what the client says meanwhile
            link.sendall(b"POST / HTTP/1.1\r\n" + b"x" * 10_000)
            assert link.recv(100).startswith(b"HTTP/1.1 503")


@pytest.mark.parametrize("descriptors", [64, 256, 1024, 65536])
def test_descriptors_stay_for_the_worker_and_refusals(
    descriptors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (descriptors, descriptors))
    config = GatewayConfig(model="m", worker="unix:w")
    assert config.connection_limit >= 1
    if descriptors > OTHER_DESCRIPTORS:
        left = descriptors - config.connection_limit - config.grpc_connection_limit
        assert left >= OTHER_DESCRIPTORS // 2 > 2 * MOST_REFUSED


def test_connections_of_chat_grpc_are_bounded(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatewayConfig, "grpc_connection_limit", 2)
    with running_stack(tmp_path, model_dir) as stack, ExitStack() as held:
        host, port = stack.grpc_target.split(":")
        for _ in range(2):
            link = held.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE))
            # the server's settings
            link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            assert link.recv(1)
        with grpc.insecure_channel(stack.grpc_target) as channel:
            call = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=1.0)
            assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        held.close()
        with grpc.insecure_channel(stack.grpc_target) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert check(b"", timeout=PATIENCE, wait_for_ready=True)


def test_a_shortage_of_descriptors_is_told_once_and_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PAUSE_S", 0.001)

    async def main() -> int:
        with socket.create_server(("127.0.0.1", 0)) as real, socket.create_connection(real.getsockname()):
            tries = 0

            def accept() -> None:
                nonlocal tries
                tries += 1
                raise OSError(errno.EMFILE, "too many")

            scarce = SimpleNamespace(accept=accept, setblocking=real.setblocking, fileno=real.fileno)
            serving = Acceptor(scarce, Seats(1), partial(Mock), None, 1.0)
            while tries < 20:
                await asyncio.sleep(0.001)
            serving.close()
            return tries

    assert asyncio.run(main()) >= 20
    assert ["ulimit -n" in each.message for each in caplog.records] == [True]
