"""`python -m gateway` as its supervisor sees it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_worker import FakeWorker, Script, start_worker
from gateway_stack import write_tokenizer
from waiting import PATIENCE

from gateway.config import parse_config
from gateway.errors import ConfigError

BODY = {"messages": [{"role": "user", "content": "hello"}]}
PYTHON = [sys.executable, "-m", "gateway"]
ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[str, Script]]:
    """A fake worker in a thread: a process of its own for the gateway."""
    address, script = f"unix:{tmp_path}/worker.sock", Script(reply=[70, 71, 72], token_s=0.3)
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
    assert started.wait(10)
    yield address, script
    loop.call_soon_threadsafe(ended.set)
    thread.join(10)
    loop.close()


def wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"event": "ready"}


def start(model_dir: Path, worker: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    port = free_port()
    command = [
        *PYTHON,
        "--model",
        str(model_dir),
        "--worker",
        worker,
        "--port",
        str(port),
        "--grpc-port",
        "0",
    ]
    process = subprocess.Popen(
        [*command, "--json-events", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_ready(process)
    return process, f"http://127.0.0.1:{port}"


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    return process.returncode, errors


def test_sigterm_drains(model_dir: Path, worker: tuple[str, Script]) -> None:
    process, url = start(model_dir, worker[0], "--shutdown-timeout", "10", "--served-model-name", "tiny")
    try:
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}, timeout=20
        ) as running:
            lines = running.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 5
            while (refused := httpx.get(f"{url}/ready", timeout=5)).status_code != 503:
                assert time.monotonic() < deadline
            refused = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=5)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "shutting_down"
            assert [line for line in lines if line][-1] == "data: [DONE]"
    finally:
        status, errors = finish(process)
    assert status == 0, errors
    # nothing that a client wrote is logged
    assert "hello" not in errors


def test_sigterm_without_patience_cuts_off(model_dir: Path, worker: tuple[str, Script]) -> None:
    worker[1].hang_at = 1
    process, url = start(model_dir, worker[0], "--shutdown-timeout", "0")
    try:
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}, timeout=20
        ) as running:
            lines = running.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
    finally:
        status, errors = finish(process)
    assert status == 0, errors


def test_busy_port_and_bad_models_end_with_one_line(tmp_path: Path, model_dir: Path) -> None:
    broken = write_tokenizer(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = [
            (["--model", str(model_dir), "--port", str(taken.getsockname()[1])], "--port"),
            (["--model", str(tmp_path / "empty"), "--port", "0"], "no tokenizer.json"),
            (["--model", str(tmp_path / "missing"), "--port", "0"], "no such directory"),
            (["--model", str(broken), "--port", "0"], "cannot be loaded"),
            (["--model", str(model_dir), "--port", "0", "--host", "0.0.0.0"], "--allow-open"),
        ]
        common = ["--worker", "unix:/nowhere", "--grpc-port", "0"]
        running = [
            (
                subprocess.Popen(
                    [*PYTHON, *arguments, *common],
                    cwd=ROOT,
                    stderr=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                ),
                text,
            )
            for arguments, text in cases
        ]
        for process, text in running:
            status, errors = finish(process)
            assert status == 2, errors
            assert text in errors
            assert len(errors.strip().splitlines()) == 1, errors


def test_dies_with_its_parent(model_dir: Path, worker: tuple[str, Script]) -> None:
    command = [
        *PYTHON,
        "--model",
        str(model_dir),
        "--worker",
        worker[0],
        "--port",
        str(free_port()),
        "--grpc-port",
        "0",
    ]
    script = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *command, "--grpc-port", "0", "--json-events"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_ready(parent)
    parent.kill()
    parent.wait()
    # the child holds the pipe open until it ends
    assert parent.stdout.read() == ""
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{child}"):
        if Path(f"/proc/{child}/stat").read_text().split(") ")[1][0] == "Z":
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_process_loads_no_torch(model_dir: Path) -> None:
    script = """
import sys
import gateway.__main__, gateway.server
from gateway.config import GatewayConfig
from gateway.records import Message
from gateway.server import load
tokenizer, _ = load(GatewayConfig(model=sys.argv[1], worker="w"))
text = tokenizer.render_chat([Message("user", "hi")], {})
tokenizer.decode(tokenizer.encode(text, False))
print(sorted({"torch", "triton", "faiss", "ray"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(model_dir)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_without_a_worker(model_dir: Path, tmp_path: Path) -> None:
    process, url = start(model_dir, f"unix:{tmp_path}/nothing.sock")
    try:
        for path in ("/health", "/ready", "/v1/models"):
            response = httpx.get(url + path, timeout=10)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "worker_unavailable"
        refused = httpx.post(f"{url}/v1/chat/completions", json={**BODY, "stream": True}, timeout=10)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        metrics = httpx.get(f"{url}/metrics", timeout=10)
        assert 'outcome="WorkerUnavailable"' in metrics.text
        process.send_signal(signal.SIGTERM)
    finally:
        status, errors = finish(process)
    assert status == 0, errors


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--nope"], {}, "unrecognized arguments: --nope"),
        (["--max-concurrent", "many"], {}, "--max-concurrent: invalid int value: 'many'"),
        ([], {"CARREL_MAX_CONCURRENT": "many"}, "--max-concurrent: invalid int value: 'many'"),
    ],
)
def test_an_option_that_cannot_be_read_is_a_config_error(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(["--model", "m", "--worker", "w", *arguments], environment)
