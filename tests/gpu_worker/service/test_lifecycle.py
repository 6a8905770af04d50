"""From ready to ended, with a fake engine behind a real server."""

import asyncio
import io
import json
import socket
import threading

import grpc
import pytest
from fake_engine import FakeEngine
from fake_store import FakeStore
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import PATIENCE, eventually, wait_until

from carrel.process.events import ProcessEvents
from gpu_worker.errors import ConfigError
from gpu_worker.records import EngineStats
from gpu_worker.service import lifecycle
from gpu_worker.service.lifecycle import Lifecycle, is_idle, status_line
from gpu_worker.service.server import prepare_address
from gpu_worker.store.sessions import Sessions
from gpu_worker.v1 import gpu_worker_pb2 as pb
from gpu_worker.v1 import gpu_worker_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Process:
    """A running lifecycle with its output and a stub."""

    def __init__(self, tmp_path, shutdown_timeout_seconds=PATIENCE, status_seconds=5.0, prepare=None):
        self.engine, self.out = FakeEngine(), io.StringIO()
        self.target = f"unix:{tmp_path}/w.sock"
        self._arguments = (
            1,
            shutdown_timeout_seconds,
            ProcessEvents("gpu_worker", True, self.out),
            status_seconds,
            prepare,
        )

    async def __aenter__(self):
        self.lifecycle = Lifecycle(self.engine, Sessions(FakeStore()), self.target, *self._arguments)
        self.task = asyncio.create_task(self.lifecycle.run())
        await eventually(lambda: "ready" in self.out.getvalue() or self.task.done())
        self.channel = grpc.aio.insecure_channel(self.target)
        self.stub = gpu_worker_pb2_grpc.GPUWorkerStub(self.channel)
        return self

    async def __aexit__(self, *_):
        self.engine.gate.set()
        self.lifecycle.request_stop()
        await self.channel.close()
        await asyncio.wait([self.task], timeout=PATIENCE)

    def generate(self, request_id="r"):
        message = pb.GenerateRequest(request_id=request_id, prompt_token_ids=[1, 2])
        message.sampling.max_tokens = 4
        return self.stub.Generate(message, timeout=PATIENCE)

    async def health(self):
        stub = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)).status

    async def exit_status(self):
        return await asyncio.wait_for(self.task, PATIENCE)


async def drain_stream(call):
    last = None
    while (response := await call.read()) is not grpc.aio.EOF:
        last = response
    return last


async def test_a_stop_lets_the_running_finish_and_refuses_the_new(tmp_path):
    async with Process(tmp_path) as process:
        assert await process.health() == SERVING
        process.engine.gate.clear()
        call = process.generate()
        await call.read()
        process.lifecycle.request_stop()
        while await process.health() == SERVING:
            await asyncio.sleep(0.005)
        assert await process.health() == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await drain_stream(process.generate(request_id="new"))
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        process.engine.gate.set()
        assert (await drain_stream(call)).complete.finish_reason == pb.FINISH_REASON_LENGTH
        assert await process.exit_status() == 0
        assert process.engine.was_closed
    assert not list(tmp_path.iterdir())


async def test_status_lines_appear_under_load_only(tmp_path):
    async with Process(tmp_path, status_seconds=0.02) as process:
        await asyncio.sleep(0.1)
        assert "status" not in process.out.getvalue()
        process.engine.endless = True
        call = process.generate()
        await call.read()
        # the first ones may be of a request that still waits
        await eventually(lambda: "running 1, waiting 0" in process.out.getvalue())
        call.cancel()
        events = [json.loads(line) for line in process.out.getvalue().splitlines()]
        assert events[0] == {"event": "ready"}
        assert {event["event"] for event in events[1:]} == {"status"}


async def test_status_lines_go_on_after_an_unexpected_error(tmp_path, monkeypatch):
    failures = [ZeroDivisionError("inner")]

    def fail_once(*readings):
        if failures:
            raise failures.pop()
        return "told again"

    monkeypatch.setattr(lifecycle, "status_line", fail_once)
    async with Process(tmp_path, status_seconds=0.02) as process:
        process.engine.endless = True
        call = process.generate()
        await eventually(lambda: "told again" in process.out.getvalue())
        call.cancel()


async def test_it_serves_once_the_engine_is_prepared_on_its_own_thread(tmp_path):
    go_on, threads = threading.Event(), []

    def prepare(is_stopped):
        threads.append(threading.current_thread().name)
        assert go_on.wait(PATIENCE)

    process = Process(tmp_path, prepare=prepare)
    entering = asyncio.create_task(process.__aenter__())
    await eventually(lambda: threads)
    assert not list(tmp_path.iterdir())
    assert "ready" not in process.out.getvalue()
    go_on.set()
    await entering
    assert await process.health() == SERVING
    assert (await drain_stream(process.generate())).complete.finish_reason == pb.FINISH_REASON_LENGTH
    assert threads == ["engine"]
    await process.__aexit__()


class Broken(FakeEngine):
    """Fails at its first step, before anybody asks for anything."""

    has_work = True


async def test_an_engine_that_dies_before_its_preparation_ends_the_process(tmp_path):
    process = Process(tmp_path, prepare=lambda is_stopped: None)
    process.engine = Broken()
    process.engine.error = ZeroDivisionError("inner")
    async with process:
        assert await process.exit_status() == 1
    assert "ready" not in process.out.getvalue()


async def test_a_stop_ends_the_preparation_and_nothing_is_served(tmp_path):
    begun = threading.Event()

    def prepare(is_stopped):
        begun.set()
        wait_until(is_stopped)

    process = Process(tmp_path, prepare=prepare)
    entering = asyncio.create_task(process.__aenter__())
    await eventually(begun.is_set)
    process.lifecycle.request_stop()
    await entering
    assert await process.exit_status() == 0
    assert process.out.getvalue() == ""
    assert process.engine.was_closed
    await process.__aexit__()


async def test_an_address_in_use_is_refused(tmp_path):
    async with Process(tmp_path) as process:
        with pytest.raises(ConfigError, match="another process"):
            await asyncio.to_thread(prepare_address, process.target)


async def test_an_address_that_cannot_be_bound_ends_the_start_and_the_engine():
    engine = FakeEngine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="another process"):
            await asyncio.to_thread(prepare_address, listen)
        events = ProcessEvents("gpu_worker", False, io.StringIO())
        lifecycle = Lifecycle(engine, Sessions(FakeStore()), listen, 1, 1.0, events)
        with pytest.raises(ConfigError, match="cannot be bound"):
            await asyncio.wait_for(lifecycle.run(), PATIENCE)
    assert engine.was_closed


def test_prepare_address_makes_a_private_folder_and_spares_files(tmp_path):
    prepare_address(f"unix:{tmp_path}/run/w.sock")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        prepare_address(f"unix:{tmp_path}/notes")
    with pytest.raises(ConfigError):
        prepare_address(f"unix:{tmp_path}/notes/w.sock")


def test_status_line_tells_rates_between_two_readings():
    before = EngineStats(
        prompt_tokens_total=100, generation_tokens_total=10, selected_rows_total=100, slot_capacity_tokens=8
    )
    now = EngineStats(
        running=2, waiting=1, slot_used_tokens=4, slot_capacity_tokens=8, prompt_tokens_total=1100,
        generation_tokens_total=60, selected_rows_total=300, hit_rows_total=150, store_reachable=False,
    )  # fmt: skip
    assert status_line(before, now, 5.0) == (
        "running 2, waiting 1; prompt 200 tok/s, generation 10 tok/s; slots 50 %; hit rate 75 %; KV store unreachable"
    )
    assert is_idle(before, before)
    assert not is_idle(before, now)


@pytest.mark.parametrize(
    ("prefilling", "left", "told"), [(2, 570, "prefill 2 prompts 43 %"), (1, 1000, "prefill 1 prompt 0 %")]
)
def test_status_line_tells_how_far_prompts_are(prefilling, left, told):
    now = EngineStats(
        running=3, prefilling=prefilling, prefilling_tokens=1000, prefilling_tokens_left=left
    )  # fmt: skip
    assert status_line(EngineStats(), now, 1.0).split("; ")[1] == told
