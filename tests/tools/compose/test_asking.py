"""What `make compose-test` calls the end of a stream; the containers themselves need an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import pytest
import yaml

from kv_store.config import parse_config as parse_store
from tools.compose.asking import RunningStream, check_answer
from tools.compose.deployment import EPOCH, ROOT, SERVICES, CheckFailed, Deployment

DELTA = b'data: {"choices": [{"index": 0, "delta": {"content": "4"}, "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
ERROR = (
    b'data: {"error": {"message": "m", "type": "ServiceUnavailableError", "code": "worker_unavailable"}}\n\n'
)
END_S = 20.0


class Gateway(ThreadingHTTPServer):
    """Answers every question with `status` and `pieces`, and closes too early where `is_cut`."""

    def __init__(self, status: int, pieces: list[bytes], is_cut: bool) -> None:
        self.may_go_on = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                gateway: Gateway = self.server  # type: ignore[assignment]
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Content-Length", str(sum(map(len, pieces)) + is_cut))
                self.end_headers()
                self.wfile.write(pieces[0])
                gateway.may_go_on.wait(END_S)
                self.wfile.write(b"".join(pieces[1:]))

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def gateways() -> Iterator[list[Gateway]]:
    started: list[Gateway] = []
    yield started
    for gateway in started:
        gateway.may_go_on.set()
        gateway.shutdown()
        gateway.server_close()


def stream_of(
    gateways: list[Gateway], pieces: list[bytes], status: int = 200, is_cut: bool = False
) -> RunningStream:
    gateway = Gateway(status, pieces, is_cut)
    threading.Thread(target=gateway.serve_forever, daemon=True).start()
    gateways.append(gateway)
    return RunningStream(Mock(spec=Deployment, port=gateway.server_port, key="k"), {})


@pytest.mark.parametrize(
    ("pieces", "is_cut", "reason", "error"),
    [
        ([DELTA, LAST], False, "length", ""),
        ([DELTA, ERROR], False, "", "worker_unavailable"),
        ([DELTA, DELTA], True, "", "RemoteProtocolError"),
    ],
    ids=["whole", "error frame", "broken connection"],
)
def test_a_stream_says_how_it_ended(
    gateways: list[Gateway], pieces: list[bytes], is_cut: bool, reason: str, error: str
) -> None:
    stream = stream_of(gateways, pieces, is_cut=is_cut)
    stream.wait_for_deltas(1)
    gateways[0].may_go_on.set()
    stream.wait_for_end(END_S)
    assert (stream.finish_reason, stream.error) == (reason, error)
    assert stream.text.startswith("4")


def test_a_stream_that_hangs_fails_the_test(gateways: list[Gateway]) -> None:
    stream = stream_of(gateways, [DELTA, LAST])
    with pytest.raises(CheckFailed, match="not ended within"):
        stream.wait_for_end(0.1)


def test_a_stream_that_is_refused_never_begins(gateways: list[Gateway]) -> None:
    stream = stream_of(gateways, [b"full", b""], status=503)
    gateways[0].may_go_on.set()
    with pytest.raises(CheckFailed, match="503 full"):
        stream.wait_for_deltas(1)


@pytest.mark.parametrize(
    ("answer", "policy", "offloaded", "moved"),
    [
        ("48214", "pqcache", 8094, 1),
        ("48213", "full", 8094, 1),
        ("48213", "pqcache", 0, 1),
        ("48213", "pqcache", 8094, 0),
    ],
)
def test_an_answer_must_be_right_and_recalled(answer: str, policy: str, offloaded: int, moved: int) -> None:
    with pytest.raises(CheckFailed):
        check_answer("REST", answer, policy, offloaded, moved)


def test_it_asks_the_containers_that_compose_starts() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert {name for name, service in services.items() if "cpu" in service["profiles"]} == set(SERVICES)
    store = parse_store(services["kv-store"]["command"])
    # the store puts its arena's socket beside the one it listens at
    assert f'"{store.listen.removeprefix("unix:").rsplit("/", 1)[0]}/arena.sock"' in EPOCH
