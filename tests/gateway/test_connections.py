"""Sockets that ask for nothing, or read nothing, hold neither the server nor its places."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from gateway_stack import Stack, running_stack
from waiting import PATIENCE, wait_until

from gateway import body_limits
from gateway.rest.connection import READ_BYTES, STILL_THERE

COMPLETIONS = "/v1/completions"


def connect(stack: Stack) -> socket.socket:
    address = httpx.URL(stack.url)
    return socket.create_connection((address.host, address.port), timeout=PATIENCE)


def drip(connection: socket.socket) -> None:
    """Send a byte now and then until the other side has closed."""
    connection.settimeout(0.05)
    while True:
        try:
            connection.sendall(b"x")
            if not connection.recv(4096):
                return
        except TimeoutError:
            continue
        except OSError:
            return


def test_a_connection_without_a_request_is_ended(tmp_path: Path, model_dir: Path) -> None:
    with running_stack(tmp_path, model_dir, header_timeout_s=0.3, api_keys=("k",)) as stack:
        with connect(stack) as silent:
            assert silent.recv(1) == b""
        with connect(stack) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: ")
            drip(slow)
        with connect(stack) as refused:
            # answered without a key, and what is left of its body is nobody's request
            refused.sendall(
                f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n".encode()
            )
            assert b"401" in refused.recv(100)
            drip(refused)
        # one with a request is not, however long its answer takes
        script = stack.say("the fox", is_silent=True)
        with httpx.Client(base_url=stack.url, timeout=PATIENCE) as http:
            body = {"prompt": "a", "stream": True}
            with http.stream("POST", COMPLETIONS, json=body, headers={"Authorization": "Bearer k"}) as answer:
                lines = answer.iter_lines()
                while next(lines) != ": ping":
                    pass
                for _ in range(4):
                    next(line for line in lines if line)
                script.is_silent = False
                assert list(lines)[-2] == "data: [DONE]"


def test_connections_are_bounded_and_the_longest_idle_gives_way(tmp_path: Path, model_dir: Path) -> None:
    with (
        running_stack(tmp_path, model_dir, header_timeout_s=PATIENCE, max_connections=2) as stack,
        ExitStack() as held,
    ):
        first, second = (held.enter_context(connect(stack)) for _ in range(2))
        assert httpx.get(f"{stack.url}/version", timeout=PATIENCE).status_code == 200
        assert first.recv(1) == b""
        stack.say("the fox", hang_at=1)
        for _ in range(2):
            http = held.enter_context(httpx.Client(base_url=stack.url, timeout=PATIENCE))
            held.enter_context(http.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}))
        assert second.recv(1) == b""
        with connect(stack) as third:
            assert third.recv(100).startswith(b"HTTP/1.1 503")


def test_a_client_that_reads_nothing_is_ended(tmp_path: Path, model_dir: Path) -> None:
    options = {"write_timeout_s": 0.3, "max_connections": 1}
    with running_stack(tmp_path, model_dir, **options) as stack, connect(stack) as deaf:
        # far more than the kernel keeps for it
        deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        wait_until(lambda: httpx.get(f"{stack.url}/version", timeout=PATIENCE).status_code == 200)


def test_what_is_no_http_ends_its_connection_and_no_more(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(stack) as link:
        link.sendall(head + b"no chunk\r\n")
        assert b" 400 " in link.recv(1000)
    with connect(stack) as answered:
        answered.sendall(head)
        assert b" 404 " in answered.recv(1000)
        answered.sendall(b"no chunk\r\n")
        drip(answered)
    assert [record.message for record in caplog.records if record.exc_info] == []


def question(stack: Stack, is_stream: bool, version: str = "1.1") -> bytes:
    body = json.dumps({"prompt": "a", "stream": is_stream}).encode()
    head = f"POST {COMPLETIONS} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_all(link: socket.socket) -> bytes:
    return b"".join(iter(lambda: link.recv(65536), b""))


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(stack: Stack, is_stream: bool) -> None:
    script = stack.say("the fox", is_late=True)
    with connect(stack) as link:
        link.sendall(question(stack, is_stream))
        link.shutdown(socket.SHUT_WR)
        wait_until(lambda: script.requests)
        script.is_late = False
        answer = read_all(link)
    # it may be asked whether it is still there
    assert b"HTTP/1.1 200 OK" in answer.removeprefix(STILL_THERE)[:20]
    assert answer.endswith(b"0\r\n\r\n" if is_stream else b"}")
    assert b"the" in answer


def test_requests_that_came_before_the_end_are_all_answered(stack: Stack) -> None:
    stack.say("the fox")
    with connect(stack) as link:
        link.sendall(question(stack, False) * 3)
        link.shutdown(socket.SHUT_WR)
        assert read_all(link).count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_leaves_while_it_waits_frees_the_worker(stack: Stack, version: str) -> None:
    script = stack.say("the fox", hang_at=1)
    with connect(stack) as link:
        link.sendall(question(stack, False, version))
        wait_until(lambda: script.requests)
    wait_until(lambda: script.num_cancelled == 1 and not stack.service.admission.num_running)


def test_half_a_request_is_ended_with_its_client(stack: Stack) -> None:
    for length in (10, -3):
        with connect(stack) as link:
            link.sendall(question(stack, False)[:length])
            link.shutdown(socket.SHUT_WR)
            assert link.recv(1) == b""
    wait_until(lambda: not stack.service.bodies.room.num_bytes)


def test_a_body_that_nobody_asks_for_is_not_read(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays with its client, however many there are."""
    monkeypatch.setattr(body_limits, "PATIENCE_S", PATIENCE)
    with running_stack(tmp_path, model_dir, max_incoming_bytes=4 * 2**20) as stack:
        room = stack.service.bodies.room
        taken = room.taken(b"127.0.0.1", 2**20)
        asyncio.run_coroutine_threadsafe(taken.__aenter__(), stack.loop).result(PATIENCE)
        stack.say("the fox")
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        body = json.dumps({"prompt": "a", "user": "x" * 800_000}).encode()
        with connect(stack) as link:
            link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
            wait_until(lambda: held(stack))
            link.sendall(body[:40_000])
            wait_until(lambda: sum(held(stack)))
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), stack.loop).result(PATIENCE)
            assert sum(held(stack)) <= READ_BYTES
            asyncio.run_coroutine_threadsafe(taken.__aexit__(None, None, None), stack.loop).result(PATIENCE)
            link.sendall(body[40_000:])
            assert b" 200 " in link.recv(100)


def held(stack: Stack) -> list[int]:
    """Bytes of bodies that connections hold unasked."""
    return [len(each.cycle.body) for each in stack.rest.server_state.connections if each.cycle is not None]
