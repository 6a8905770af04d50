"""Between hosts a worker serves the gateway that it knows, which knows it: both by their certificates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from certificates import sign_oneself
from fake_engine import FakeEngine
from fake_store import FakeStore
from ports import free_port

from carrel.process.certificates import Identity, read_identity
from gateway.errors import WorkerUnavailable
from gateway.worker_client import GRPCWorkerClient
from gpu_worker.service.engine_thread import EngineThread
from gpu_worker.service.server import WorkerServer
from gpu_worker.store.sessions import Sessions

FLAGS = ("--key", "--certificate", "--root")


def signed(folder: Path, name: str) -> tuple[Path, Path]:
    (folder / name).mkdir()
    return sign_oneself(folder / name)


def identity(own: tuple[Path, Path], other: tuple[Path, Path]) -> Identity | None:
    return read_identity(dict(zip(FLAGS, (*own, other[1]), strict=True)))


async def test_a_worker_serves_nobody_but_the_gateway_that_it_knows(
    engine: FakeEngine, tmp_path: Path
) -> None:
    ours, gateways, strangers = (signed(tmp_path, name) for name in ("worker", "gateway", "stranger"))
    target = f"localhost:{free_port()}"
    port = EngineThread(engine, max_queue=1, on_death=lambda: None)
    server = WorkerServer(port, Sessions(FakeStore()), target, identity=identity(ours, gateways))  # type: ignore[arg-type]
    await server.start()
    for own, expected in (
        (identity(gateways, ours), True),
        (identity(strangers, ours), False),
        (identity(gateways, strangers), False),
        (None, False),
    ):
        client = GRPCWorkerClient(target, own)
        if expected:
            assert (await client.info()).max_model_len
            assert await client.is_serving()
        else:
            with pytest.raises(WorkerUnavailable):
                await client.info()
        await client.close()
    await asyncio.to_thread(port.close)
    await server.stop(0)


def test_what_belongs_together_is_given_together(tmp_path: Path) -> None:
    key, certificate = signed(tmp_path, "one")
    other, _ = signed(tmp_path, "other")
    nothing = tmp_path / "none.pem"
    assert read_identity(dict.fromkeys(FLAGS)) is None
    for files, message in (
        ((key, certificate, None), "--root too"),
        ((other, certificate, certificate), "--certificate .* cannot be used"),
        ((key, certificate, key), "--root .* cannot be used"),
        ((key, certificate, nothing), "--root .* cannot be used"),
    ):
        with pytest.raises(ValueError, match=message):
            read_identity(dict(zip(FLAGS, files, strict=True)))
