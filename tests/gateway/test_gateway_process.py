"""`python -m gateway` as its supervisor sees it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from certificates import sign_oneself
from fake_worker import FakeWorker, Script, start_worker
from gateway_stack import write_tokenizer
from ports import free_port, free_ports
from waiting import PATIENCE, wait_until

from gateway.__main__ import main
from gateway.v1 import chat_pb2, chat_pb2_grpc

BODY = {"messages": [{"role": "user", "content": "hello"}]}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[str, Script]]:
    """A fake worker in a thread: a process of its own for the gateway."""
    address, script = f"unix:{tmp_path}/worker.sock", Script(reply=[70, 71, 72])
    started = threading.Event()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def main() -> None:
        server = await start_worker(FakeWorker(lambda: script, 300, 256), address)
        started.set()
        await ended.wait()
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert started.wait(PATIENCE)
    yield address, script
    loop.call_soon_threadsafe(ended.set)
    thread.join(PATIENCE)
    loop.close()


def command(model_dir: Path, worker: str, *arguments: str, grpc_port: int = 0) -> list[str]:
    line = [
        sys.executable,
        "-m",
        "gateway",
        "--model",
        str(model_dir),
        "--worker",
        worker,
        "--grpc-port",
        str(grpc_port),
    ]
    return [*line, *arguments]


def start(line: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if (line := process.stdout.readline()) != '{"event": "ready"}\n':
        process.terminate()
        pytest.fail(f"not ready but {line!r}: {finish(process)}")


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    return process.returncode, errors


@contextmanager
def running(
    model_dir: Path, worker: str, *arguments: str, grpc_port: int = 0
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A ready gateway, which must then be told to end, and a client of it."""
    port = next(str(each) for each in free_ports(2) if each != grpc_port)
    more = ("--port", port, "--json-events", "--log-level", "debug", *arguments)
    process = start(command(model_dir, worker, *more, grpc_port=grpc_port))
    try:
        wait_ready(process)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            yield process, client
    finally:
        status, errors = finish(process)
    assert status == 0, errors
    # nothing that a client wrote is logged, however much is
    assert "hello" not in errors
    assert "Traceback" not in errors
    assert {json.loads(line)["process"] for line in errors.splitlines()} <= {"gateway"}


def test_sigterm_drains(model_dir: Path, worker: tuple[str, Script]) -> None:
    worker[1].is_held = True
    with (
        running(model_dir, worker[0], "--shutdown-timeout", str(PATIENCE)) as (process, client),
        client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as stream,
        httpx.Client(base_url=client.base_url, timeout=PATIENCE) as other,
    ):
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: other.get("/ready").status_code == 503)
        refused = other.post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "shutting_down"
        worker[1].is_held = False
        assert stream.read().endswith(b"data: [DONE]\n\n")


# how a drain ends before the requests do: its time is over, or a signal comes again
CUTS = {
    "time is over": ("0", [signal.SIGTERM]),
    "second SIGTERM": (str(PATIENCE), [signal.SIGTERM, signal.SIGTERM]),
    "second SIGINT": (str(PATIENCE), [signal.SIGINT, signal.SIGINT]),
    "SIGHUP": ("0", [signal.SIGHUP]),
}
INPUT = {"input": "hello"}
PROMPT = {"prompt": "hello"}
# route, body, and what the error is there
ANSWERS = [
    ("/v1/chat/completions", BODY, "data: {"),
    ("/v1/completions", PROMPT, "data: {"),
    ("/v1/responses", INPUT, "event: error\ndata: {"),
    ("/v1/messages", {**BODY, "max_tokens": 8}, "event: error\ndata: {"),
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("path", "body", "lead"), ANSWERS)
def test_a_stream_that_a_drain_cuts_off_ends_with_an_error_frame(
    model_dir: Path, worker: tuple[str, Script], path: str, body: dict[str, object], lead: str, cut: str
) -> None:
    worker[1].is_held = True
    timeout, numbers = CUTS[cut]
    with (
        running(model_dir, worker[0], "--shutdown-timeout", timeout) as (process, client),
        httpx.Client(base_url=client.base_url, timeout=PATIENCE) as other,
        client.stream("POST", path, json={**body, "stream": True}) as stream,
    ):
        process.send_signal(numbers[0])
        for number in numbers[1:]:
            # two pending signals of one kind would be one
            wait_until(lambda: other.get("/ready").status_code == 503)
            process.send_signal(number)
        # a body that is cut raw raises here
        told = stream.read().decode()
        frames = [each for each in told.split("\n\n") if "shutting_down" in each]
        assert len(frames) == 1, told
        assert frames[0].startswith(lead)
        assert "The server is shutting down." in frames[0]
        assert told.endswith("data: [DONE]\n\n") == ("completions" in path)


@pytest.mark.parametrize(("path", "body"), [answer[:2] for answer in ANSWERS])
def test_an_answer_that_a_drain_cuts_off_is_a_503(
    model_dir: Path, worker: tuple[str, Script], path: str, body: dict[str, object]
) -> None:
    worker[1].is_held = True
    with running(model_dir, worker[0], "--shutdown-timeout", "0") as (process, client):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.post, path, json=body)
            wait_until(lambda: worker[1].requests)
            process.send_signal(signal.SIGTERM)
            answer = asked.result(PATIENCE)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("cut", CUTS)
def test_a_call_that_a_drain_cuts_off_ends_with_an_error_event(
    model_dir: Path, worker: tuple[str, Script], cut: str
) -> None:
    worker[1].reply, worker[1].hang_at = [70, 71, 72], 1
    timeout, numbers = CUTS[cut]
    grpc_port = free_port()
    with (
        running(model_dir, worker[0], "--shutdown-timeout", timeout, grpc_port=grpc_port) as (
            process,
            client,
        ),
        grpc.insecure_channel(f"localhost:{grpc_port}") as channel,
    ):
        message = chat_pb2.Message(role="user", content="hello")
        events = chat_pb2_grpc.ChatStub(channel).Complete(chat_pb2.ChatRequest(messages=[message]))
        first = next(events)
        assert not first.HasField("error")
        process.send_signal(numbers[0])
        for number in numbers[1:]:
            wait_until(lambda: client.get("/ready").status_code == 503)
            process.send_signal(number)
        *_, last = events
        assert (last.error.code, last.error.message) == (503, "The server is shutting down.")


def test_a_busy_port_ends_with_one_line(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, errors = finish(start(command(model_dir, "unix:/nowhere", "--port", port)))
    assert status == 2, errors
    assert "--port" in errors
    assert len(errors.strip().splitlines()) == 1, errors


def test_bad_models_and_an_open_port_end_with_one_line(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = write_tokenizer(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    hot = write_tokenizer(tmp_path / "hot")
    (hot / "generation_config.json").write_text('{"temperature": 5}')
    (tmp_path / "empty").mkdir()
    cases = [
        (tmp_path / "empty", [], "no tokenizer.json"),
        (tmp_path / "missing", [], "no such directory"),
        (broken, [], "cannot be loaded"),
        (hot, [], "temperature is 5; it must be a number in [0, 2]"),
        (model_dir, ["--host", "0.0.0.0"], "--allow-open"),
    ]
    for model, arguments, text in cases:
        line = command(model, "unix:/nowhere", "--port", "0", *arguments)
        monkeypatch.setattr("sys.argv", line[2:])
        assert main() == 2
        errors = capfd.readouterr().err
        assert text in errors
        assert len(errors.strip().splitlines()) == 1, errors


def test_dies_with_its_parent(model_dir: Path, worker: tuple[str, Script]) -> None:
    script = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()"
    line = command(model_dir, worker[0], "--port", str(free_port()), "--json-events")
    parent = start([sys.executable, "-c", script, *line])
    assert parent.stdout is not None
    child = Path(f"/proc/{int(parent.stdout.readline())}/stat")
    wait_ready(parent)
    parent.kill()
    parent.wait()
    # the child holds the pipe open until it ends
    assert parent.stdout.read() == ""
    wait_until(lambda: not child.exists() or child.read_text().split(") ")[1][0] == "Z")


def test_without_a_worker(model_dir: Path, tmp_path: Path) -> None:
    with running(model_dir, f"unix:{tmp_path}/nothing.sock") as (process, client):
        for path in ("/health", "/ready", "/v1/models"):
            response = client.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "worker_unavailable"
        refused = client.post("/v1/chat/completions", json={**BODY, "stream": True})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert 'outcome="WorkerUnavailable"' in client.get("/metrics").text
        process.send_signal(signal.SIGTERM)


def test_a_unix_socket_takes_the_place_of_the_port(
    tmp_path: Path, model_dir: Path, worker: tuple[str, Script]
) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    names = ("--served-model-name", "tiny", "other")
    with running(model_dir, worker[0], "--uds", str(path), *names) as (process, by_port):
        way = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=way, base_url="http://localhost", timeout=PATIENCE) as client:
            assert client.get("/ready").status_code == 200
            assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny", "other"]
            assert client.get("/v1/models/other").json()["id"] == "other"
            for name in ("tiny", "other"):
                answer = client.post("/v1/chat/completions", json={**BODY, "model": name})
                assert answer.json()["model"] == "tiny"
            assert client.post("/v1/chat/completions", json={**BODY, "model": "third"}).status_code == 404
        with pytest.raises(httpx.ConnectError):
            by_port.get("/ready")
        status, errors = finish(start(command(model_dir, worker[0], "--uds", str(path))))
        assert (status, "--uds" in errors, path.exists()) == (2, True, True)
        process.send_signal(signal.SIGTERM)
    assert not path.exists()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return sign_oneself(tmp_path)


def test_both_protocols_are_served_over_tls(
    model_dir: Path, worker: tuple[str, Script], certificate: tuple[Path, Path]
) -> None:
    key, found = certificate
    grpc_port = free_port()
    options = ["--ssl-keyfile", str(key), "--ssl-certfile", str(found)]
    with running(model_dir, worker[0], *options, grpc_port=grpc_port) as (process, plain):
        trusting = ssl.create_default_context(cafile=str(found))
        url = str(plain.base_url).replace("http:", "https:")
        with httpx.Client(base_url=url, verify=trusting, timeout=PATIENCE) as client:
            # the second is many records, and many reads
            for body in (BODY, {**BODY, "user": "x" * 500_000}):
                assert client.post("/v1/chat/completions", json=body).status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            plain.get("/ready")
        credentials = grpc.ssl_channel_credentials(found.read_bytes())
        with grpc.secure_channel(f"localhost:{grpc_port}", credentials) as channel:
            stub = chat_pb2_grpc.ChatStub(channel)
            assert len(stub.ListModels(chat_pb2.ListModelsRequest(), timeout=PATIENCE).models) == 1
        process.send_signal(signal.SIGTERM)


def test_another_tokenizer_and_the_path_of_a_proxy(
    tmp_path: Path, model_dir: Path, worker: tuple[str, Script]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    options = ["--tokenizer", str(model_dir), "--root-path", "/llm", "--api-key", "k"]
    with running(bare, worker[0], *options) as (process, client):
        key = {"Authorization": "Bearer k"}
        # whether the proxy leaves its path or not
        for path in ("/llm", ""):
            assert client.get(f"{path}/ready").status_code == 200
            assert client.get(f"{path}/v1/models").status_code == 401
            answer = client.post(f"{path}/tokenize", json={"prompt": "hello"}, headers=key)
            assert answer.json()["count"] > 0
        schema = client.get("/openapi.json", headers=key).json()
        assert schema["servers"] == [{"url": "/llm"}]
        process.send_signal(signal.SIGTERM)
