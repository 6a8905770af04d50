"""Sockets that ask for nothing, or read nothing, hold neither the server nor its places."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from gateway_stack import Stack, running_stack
from waiting import PATIENCE, wait_until

from gateway.listener import AcceptErrors

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


def test_a_shortage_of_descriptors_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def fail_often() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(AcceptErrors())
        for _ in range(100):
            loop.call_exception_handler({"message": "m", "exception": OSError(errno.EMFILE, "too many")})
        loop.call_exception_handler({"message": "another", "exception": ValueError("v")})

    asyncio.run(fail_often())
    assert [("ulimit -n" in each.message, "another" in each.message) for each in caplog.records] == [
        (True, False),
        (False, True),
    ]


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
