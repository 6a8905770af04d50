"""Store and client of different versions refuse each other, each naming both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from store_samples import LAYOUT, SLAB_BYTES
from waiting import PATIENCE

from carrel.process.version import Edition
from kv_store.client import StoreClient, StoreUnreachable, VersionMismatch, check_edition, wire
from kv_store.client.wire import own_edition
from kv_store.local import LocalStore
from kv_store.v1 import kv_store_pb2 as pb
from kv_store.v1 import kv_store_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
OTHER = Edition("9.9.9", "0badcafe")


def connect(target: str) -> StoreClient:
    return StoreClient.connect(target, LAYOUT, worker_id="w", transport="grpc", timeout_seconds=PATIENCE)


def start_store() -> LocalStore:
    return LocalStore(64 * SLAB_BYTES, slab_bytes=SLAB_BYTES)


def attach_anybody(request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachResponse:
    return pb.AttachResponse(epoch=1, slab_bytes=SLAB_BYTES, tokens_per_slab=32, lease_seconds=30.0)


@pytest.fixture
def older_store(tmp_path: Path) -> Iterator[str]:
    """A store that attaches whoever comes, and knows no Hello."""
    attach = grpc.unary_unary_rpc_method_handler(
        attach_anybody, pb.AttachRequest.FromString, pb.AttachResponse.SerializeToString
    )
    service = pb.DESCRIPTOR.services_by_name["KVStore"].full_name
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Attach": attach}),))
    target = f"unix:{tmp_path}/s"
    server.add_insecure_port(target)
    server.start()
    yield target
    server.stop(0).wait()


@pytest.mark.parametrize("other", [OTHER, Edition(own_edition().version, "0badcafe"), Edition("", "")])
def test_a_store_refuses_another_edition_and_says_what_to_do(local_store: LocalStore, other: Edition) -> None:
    edition = wire.edition_to_message(other)
    with grpc.insecure_channel(local_store.target) as channel:
        stub = kv_store_pb2_grpc.KVStoreStub(channel)
        calls = (
            (stub.Hello, pb.HelloRequest(edition=edition)),
            (
                stub.Attach,
                pb.AttachRequest(worker_id="w", layout=wire.layout_to_message(LAYOUT), edition=edition),
            ),
        )
        for call, request in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call(request, timeout=PATIENCE)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
            text = caught.value.details()
            assert str(own_edition()) in text
            assert str(other) in text
            assert "docs/deployment.md" in text
        assert stub.Stats(pb.StatsRequest(), timeout=PATIENCE).num_workers == 0


def test_a_client_refuses_a_store_that_does_not_compare(older_store: str) -> None:
    for call in (connect, lambda target: check_edition(target, PATIENCE)):
        with pytest.raises(VersionMismatch, match="does not tell its name") as caught:
            call(older_store)
        assert str(own_edition()) in str(caught.value)


def test_a_store_that_comes_back_as_another_version_is_refused_until_ours_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with start_store() as store:
        client = connect(store.target)
        with monkeypatch.context() as patched:
            patched.setattr("kv_store.servicer.own_edition", lambda: OTHER)
            store.restart()
        with pytest.raises(VersionMismatch, match=r"9\.9\.9"):
            client.reattach()
        store.restart()
        client.reattach()
        client.begin("a", 0)
        client.close()


def test_nobody_there_is_no_other_version() -> None:
    with pytest.raises(StoreUnreachable):
        check_edition("unix:/nowhere/at/all", 0.5)


def test_an_installed_store_of_another_version_is_known_by_it(tmp_path: Path) -> None:
    for package in ("carrel/process", "kv_store/client", "kv_store/v1"):
        shutil.copytree(ROOT / package, tmp_path / package)
    about = tmp_path / "carrel-9.9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: carrel\nVersion: 9.9.9\n")
    code = (
        "import sys\n"
        "from kv_store.client import check_edition\n"
        "try:\n"
        "    check_edition(sys.argv[1], 5.0)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    with start_store() as store:
        found = subprocess.run(
            [sys.executable, "-c", code, store.target],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
    assert found.stdout.startswith("VersionMismatch")
    assert "Carrel 9.9.9" in found.stdout
    assert str(own_edition()) in found.stdout
