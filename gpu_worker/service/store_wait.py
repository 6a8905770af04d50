"""Waiting for the KV store at the start."""

from __future__ import annotations

import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_worker.errors import StoreUnavailable
from kv_store.client import StoreError, check_edition, open_channel

RETRY_SECONDS = 0.2
CALL_SECONDS = 2.0


def wait_for_store(store: str, timeout_seconds: float, token: str = "", root: bytes = b"") -> None:
    """Return once the store at `store` reports SERVING and is of our version, before a model is loaded for nothing.

    Raises StoreUnavailable when it does not in time, or is of another version.
    """
    _wait_until_serving(store, timeout_seconds, root)
    try:
        check_edition(store, CALL_SECONDS, token, root)
    except StoreError as error:
        raise StoreUnavailable(str(error)) from error


def _wait_until_serving(store: str, timeout_seconds: float, root: bytes) -> None:
    deadline = time.monotonic() + timeout_seconds
    # a short first reconnect: gRPC's own back-off would wait a second and more
    options = (
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    )
    with open_channel(store, options, root) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            answer = _check(stub, min(CALL_SECONDS, max(RETRY_SECONDS, deadline - time.monotonic())))
            if answer == "SERVING":
                return
            if time.monotonic() >= deadline:
                raise StoreUnavailable(
                    f"The KV store at {store} did not answer within {timeout_seconds:g} s ({answer}); "
                    "start it first, or correct --store."
                )
            time.sleep(RETRY_SECONDS)


def _check(stub: health_pb2_grpc.HealthStub, timeout_seconds: float) -> str:
    try:
        response = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
    except grpc.RpcError as error:
        return error.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
