"""A store over TCP: who may call it, and what its configuration refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from certificates import sign_oneself
from grpc_health.v1 import health_pb2, health_pb2_grpc
from store_samples import LAYOUT, SLAB_BYTES, filled
from waiting import PATIENCE

from carrel.process.token import MIN_CHARACTERS, read_token
from kv_store.client import (
    HandoffRefused,
    RowsWanted,
    StoreClient,
    StoreUnreachable,
    TokenRefused,
    check_edition,
)
from kv_store.client.rpc import TOKEN_KEY, token_metadata
from kv_store.config import StoreConfig
from kv_store.errors import ConfigError
from kv_store.server import StoreServer
from kv_store.v1 import kv_store_pb2 as pb

TOKEN = "of sixteen or more"
ARENA_BYTES = 64 * SLAB_BYTES


def serve(**options: Path) -> StoreServer:
    return StoreServer(
        StoreConfig(
            listen="127.0.0.1:0",
            arena_bytes=ARENA_BYTES,
            slab_bytes=SLAB_BYTES,
            runtime="process",
            store_token=TOKEN,
            **options,  # type: ignore[arg-type]
        )
    )


@pytest.fixture
def target() -> Iterator[str]:
    server = serve()
    yield f"127.0.0.1:{server.port}"
    server.close()


def connect(target: str, token: str, transport: str = "grpc", root: bytes = b"") -> StoreClient:
    return StoreClient.connect(
        target,
        LAYOUT,
        worker_id="w",
        transport=transport,
        max_gather_rows=64,
        timeout_seconds=PATIENCE,
        token=token,
        root=root,
    )


def test_whoever_shows_the_token_is_served(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A proxy is never asked: it would see the token.
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    check_edition(target, 5.0, TOKEN)
    client = connect(target, TOKEN)
    rows = filled(client, 40)
    assert (client.gather(0, [RowsWanted("a", 1, np.arange(40))]) == rows[1]).all()
    client.close()


@pytest.mark.parametrize(("token", "says"), [(TOKEN, False), ("another one, as long", True)])
def test_a_comparison_in_constant_time_decides(
    target: str, token: str, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hmac.compare_digest", lambda shown, known: says)
    with contextlib.nullcontext() if says else pytest.raises(TokenRefused):
        check_edition(target, 5.0, token)


@pytest.mark.parametrize("token", ["", TOKEN[:-1], TOKEN + "x", "another one, as long"])
def test_nobody_else_is(target: str, token: str) -> None:
    for call in (lambda: connect(target, token), lambda: check_edition(target, 5.0, token)):
        with pytest.raises(TokenRefused, match="CARREL_STORE_TOKEN") as caught:
            call()
        assert TOKEN not in str(caught.value)


def test_every_method_asks_for_it_and_health_does_not(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        for method in pb.DESCRIPTOR.services_by_name["KVStore"].methods:
            call = channel.stream_stream(f"/carrel.kv_store.v1.KVStore/{method.name}")
            for metadata in ((), ((TOKEN_KEY, TOKEN),), token_metadata("wrong")):
                with pytest.raises(grpc.RpcError) as caught:
                    list(call(iter([b""]), timeout=PATIENCE, metadata=metadata))
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED, method.name
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_transport_that_needs_the_arena_is_refused_over_tcp(target: str) -> None:
    for transport in ("zero_copy", "shm"):
        with pytest.raises(HandoffRefused, match="--transport grpc"):
            connect(target, TOKEN, transport)


@pytest.mark.parametrize(
    ("listen", "options", "message"),
    [
        ("0.0.0.0:5000", {}, "--store-token-file or CARREL_STORE_TOKEN"),
        ("[::]:5000", {}, "asks for a token"),
        ("store.example:5000", {}, "asks for a token"),
        ("127.0.0.1:5000", {"store_token": "short"}, "16 printable"),
        ("127.0.0.1:5000", {"store_token_file": "/nowhere"}, "--store-token-file /nowhere: cannot be read"),
        ("127.0.0.1:5000", {"runtime": "ray"}, "--arena-socket"),
    ],
)
def test_what_cannot_be_used_is_named(listen: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        StoreConfig(
            listen=listen, arena_bytes=ARENA_BYTES, slab_bytes=SLAB_BYTES, **{"runtime": "process", **options}
        )
    assert "short" not in str(caught.value)


def test_a_token_comes_from_a_file_and_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    config = StoreConfig(
        listen="0.0.0.0:5000",
        arena_bytes=ARENA_BYTES,
        slab_bytes=SLAB_BYTES,
        runtime="process",
        store_token_file=str(file),
    )
    assert config.store_token == TOKEN
    assert TOKEN not in repr(config)
    assert (read_token("", ""), read_token(TOKEN, "")) == ("", TOKEN)
    for token, text, message in (
        (TOKEN, TOKEN, "give one of both"),
        ("", " \n", "is empty"),
        ("", "x" * (MIN_CHARACTERS - 1), "16 printable"),
        ("", "line one of it\nline two of it", "16 printable"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            read_token(token, str(file))
        assert TOKEN not in str(caught.value)


def test_over_tls_the_store_is_known_by_its_certificate(tmp_path: Path) -> None:
    key, certificate = sign_oneself(tmp_path)
    (tmp_path / "other").mkdir()
    _, other = sign_oneself(tmp_path / "other")
    server = serve(store_ssl_keyfile=key, store_ssl_certfile=certificate)
    target = f"localhost:{server.port}"
    try:
        check_edition(target, PATIENCE, TOKEN, certificate.read_bytes())
        client = connect(target, TOKEN, root=certificate.read_bytes())
        rows = filled(client, 40)
        assert (client.gather(0, [RowsWanted("a", 1, np.arange(40))]) == rows[1]).all()
        client.close()
        with pytest.raises(TokenRefused):
            check_edition(target, PATIENCE, "another one, as long", certificate.read_bytes())
        for root in (b"", other.read_bytes()):
            with pytest.raises(StoreUnreachable):
                check_edition(target, 5.0, TOKEN, root)
    finally:
        server.close()


def test_a_certificate_is_for_tcp_and_has_its_key(tmp_path: Path) -> None:
    key, certificate = sign_oneself(tmp_path)
    sizes = {"arena_bytes": ARENA_BYTES, "slab_bytes": SLAB_BYTES, "runtime": "process"}
    for listen, options, message in (
        ("127.0.0.1:0", {"store_ssl_certfile": certificate}, "belong together"),
        ("127.0.0.1:0", {"store_ssl_certfile": key, "store_ssl_keyfile": key}, "cannot be used"),
        ("unix:/s", {"store_ssl_certfile": certificate, "store_ssl_keyfile": key}, "no TLS"),
    ):
        with pytest.raises(ConfigError, match=message):
            StoreConfig(listen=listen, **sizes, **options)  # type: ignore[arg-type]
