"""The worker process as its supervisor sees it: exit statuses, stdout, signals."""

import json
import os
import select
import signal
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from waiting import PATIENCE

from carrel.process.version import Edition
from gpu_worker.__main__ import available_cores
from gpu_worker.v1 import gpu_worker_pb2 as pb
from gpu_worker.v1 import gpu_worker_pb2_grpc
from kv_store.client.wire import edition_to_message, own_edition
from kv_store.v1 import kv_store_pb2, kv_store_pb2_grpc

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class FakeStore(kv_store_pb2_grpc.KVStoreServicer):
    """Says what it is, and nothing else."""

    edition = own_edition()

    def Hello(self, request, context):
        return kv_store_pb2.HelloResponse(edition=edition_to_message(self.edition))


@pytest.fixture
def fake_store():
    return FakeStore()


@pytest.fixture
def store(tmp_path, fake_store):
    """Target of a store that is healthy, and says what it is."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    kv_store_pb2_grpc.add_KVStoreServicer_to_server(fake_store, server)
    target = f"unix:{tmp_path}/s.sock"
    server.add_insecure_port(target)
    server.start()
    yield target
    server.stop(0).wait(PATIENCE)


class WorkerProcess:
    def __init__(self, arguments, kind=""):
        environ = {k: v for k, v in os.environ.items() if not k.startswith("CARREL_")}
        environ |= {"PYTHONPATH": f"{ROOT}:{HERE}", "FAKE_ENGINE": kind}
        self.popen = subprocess.Popen(
            [sys.executable, HERE / "fake_worker_process.py", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip

    def wait_for(self, event):
        """All events up to the named one."""
        events = []
        for line in self.popen.stdout:
            events.append(json.loads(line))
            if event in (events[-1]["event"], events[-1].get("stage")):
                return events
        raise AssertionError(f"no {event}: {self.popen.stderr.read()}")

    def finish(self):
        """(exit status, stderr)."""
        _, stderr = self.popen.communicate(timeout=PATIENCE)
        return self.popen.returncode, stderr


@pytest.fixture
def start(tmp_path, store):
    started = []

    def begin(kind="", *flags):
        target = f"unix:{tmp_path}/w.sock"
        arguments = ["m", "--listen", target, "--store", store, "--device", "cpu", "--json-events", *flags]
        started.append(WorkerProcess(arguments, kind))
        return started[-1], target

    yield begin
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.communicate(timeout=PATIENCE)


def open_stream(channel):
    message = pb.GenerateRequest(request_id="r", prompt_token_ids=[1, 2])
    message.sampling.max_tokens = 4
    return gpu_worker_pb2_grpc.GPUWorkerStub(channel).Generate(message, timeout=PATIENCE)


def test_it_loads_serves_and_ends_with_0_on_sigterm(start, tmp_path):
    process, target = start()
    events = process.wait_for("ready")
    assert {"event": "progress", "stage": "load weights", "done": 1, "total": 1} in events
    assert events[-2:] == [
        {"event": "progress", "stage": "warm up", "done": 1, "total": 1},
        {"event": "ready"},
    ]
    with grpc.insecure_channel(target) as channel:
        *_, last = open_stream(channel)
    assert last.complete.finish_reason == pb.FINISH_REASON_LENGTH
    process.popen.send_signal(signal.SIGTERM)
    assert process.finish() == (0, "")
    assert not (tmp_path / "w.sock").exists()


def test_a_second_sigterm_ends_it_at_once_but_one_of_each_kind_does_not(start):
    process, target = start("endless", "--shutdown-timeout", "600")
    process.wait_for("ready")
    with grpc.insecure_channel(target) as channel:
        stream = open_stream(channel)
        next(stream)
        process.popen.send_signal(signal.SIGTERM)
        process.popen.send_signal(signal.SIGINT)
        for _ in range(20):
            next(stream)
        process.popen.send_signal(signal.SIGTERM)
        assert process.finish()[0] == 128 + signal.SIGTERM


def test_a_short_timeout_aborts_and_ends_with_0(start):
    process, target = start("endless", "--shutdown-timeout", "0", "--no-warmup")
    assert "warm up" not in str(process.wait_for("ready"))
    with grpc.insecure_channel(target) as channel:
        stream = open_stream(channel)
        next(stream)
        process.popen.send_signal(signal.SIGTERM)
        *_, last = stream
    assert last.complete.finish_reason == pb.FINISH_REASON_ABORT
    assert process.finish()[0] == 0


def test_a_dead_engine_ends_it_with_1(start):
    process, target = start("dies")
    process.wait_for("ready")
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError):
        list(open_stream(channel))
    status, stderr = process.finish()
    assert status == 1
    assert "ZeroDivisionError" in stderr


def test_a_hung_engine_ends_it_with_1_and_the_stack_of_every_thread(start):
    process, target = start("hangs", "--hang-timeout", "2")
    process.wait_for("ready")
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as error:
        list(open_stream(channel))
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    status, stderr = process.finish()
    assert status == 1
    assert "Timeout" in stderr
    assert "fake_engine.py" in stderr


def test_sigterm_while_loading_ends_it_with_0(start):
    process, _ = start("loads")
    process.wait_for("load weights")
    process.popen.send_signal(signal.SIGTERM)
    assert process.finish() == (0, "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["m", "--listen", "unix:/tmp/x", "--store", "unix:/nowhere", "--budget", "0"], "--budget '0'"),
        (["m"], "CARREL_LISTEN"),
        (
            ["m", "--listen", "unix:/tmp/x", "--store", "unix:/nowhere", "--hang-timeout", "1"],
            "--hang-timeout 1",
        ),
    ],
)
def test_a_bad_flag_ends_it_with_2_and_one_line(arguments, text):
    status, stderr = WorkerProcess(arguments).finish()
    assert status == 2
    assert stderr.count("\n") == 1
    assert text in stderr


def test_a_missing_store_ends_it_with_2_and_one_line(tmp_path):
    flags = ["--store", f"unix:{tmp_path}/none.sock", "--device", "cpu", "--store-timeout", "0.3"]
    status, stderr = WorkerProcess(
        ["m", "--listen", f"unix:{tmp_path}/w.sock", *flags, "--json-events"]
    ).finish()
    assert status == 2
    assert stderr.count("\n") == 1
    assert "none.sock" in stderr


def test_a_store_of_another_version_ends_it_with_2_before_a_model_is_loaded(start, fake_store):
    fake_store.edition = Edition("0.0.1", own_edition().messages)
    process, _ = start("loads")
    status, stderr = process.finish()
    assert status == 2
    assert stderr.count("\n") == 1
    assert "0.0.1" in stderr
    assert str(own_edition()) in stderr
    assert "docs/deployment.md" in stderr


def test_it_dies_with_its_parent(start, tmp_path, store):
    # the parent starts the worker, says its pid, and is killed
    arguments = [
        "m",
        "--listen",
        f"unix:{tmp_path}/w.sock",
        "--store",
        store,
        "--device",
        "cpu",
        "--json-events",
    ]
    script = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE, text=True)\n"
        "print(p.pid, next('ready' for line in p.stdout if 'ready' in line), flush=True)\n"
        "time.sleep(600)\n"
    )
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{HERE}"}
    parent = subprocess.Popen(
        [sys.executable, "-c", script, HERE / "fake_worker_process.py", *arguments],
        stdout=subprocess.PIPE, text=True, env=environ,
    )  # fmt: skip
    pid, word = parent.stdout.readline().split()
    assert word == "ready"
    descriptor = os.pidfd_open(int(pid))
    parent.kill()
    parent.communicate(timeout=PATIENCE)
    assert select.select([descriptor], [], [], PATIENCE)[0], "the worker outlived its parent"
    os.close(descriptor)


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", None), ("50000 100000", 1), ("100000 100000", 1), ("", None)]
)
def test_cores_respect_the_containers_quota(tmp_path, quota, cores):
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    assert available_cores(file) == (cores or len(os.sched_getaffinity(0)))
