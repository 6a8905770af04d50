from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

# pytest imports test files by path; the fake engine lies beside them
sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine
from fake_store import FakeStore

from gpu_worker.service.engine_thread import EngineThread
from gpu_worker.service.server import WorkerServer
from gpu_worker.store.sessions import Sessions
from gpu_worker.store.traces import Traces
from gpu_worker.v1 import gpu_worker_pb2_grpc


@dataclass
class Worker:
    """A served fake engine and a channel to it."""

    engine: FakeEngine
    port: EngineThread
    store: FakeStore
    server: WorkerServer
    channel: grpc.aio.Channel
    stub: gpu_worker_pb2_grpc.GPUWorkerStub
    target: str
    traces: Traces


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest_asyncio.fixture()
async def worker(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Worker]:
    target = f"unix:{tmp_path}/w.sock"
    port = EngineThread(engine, max_queue=3, on_death=lambda: None)
    store = FakeStore()
    traces = Traces()
    server = WorkerServer(port, Sessions(store), target, max_pending=64, traces=traces)  # type: ignore[arg-type]
    await server.start()
    async with grpc.aio.insecure_channel(target) as channel:
        stub = gpu_worker_pb2_grpc.GPUWorkerStub(channel)
        yield Worker(engine, port, store, server, channel, stub, target, traces)
    engine.gate.set()
    await asyncio.to_thread(port.close)
    await server.stop(0)
