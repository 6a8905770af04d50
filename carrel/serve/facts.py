"""Facts about the running processes, for the banner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import httpx

from carrel.serve.children import Endpoints
from gpu_worker.v1 import gpu_worker_pb2, gpu_worker_pb2_grpc
from kv_store.v1 import kv_store_pb2, kv_store_pb2_grpc

TIMEOUT_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """Empty fields are unknown; the banner leaves them out."""

    served_name: str = ""
    routes: tuple[str, ...] = ()
    worker: gpu_worker_pb2.GetInfoResponse = field(default_factory=gpu_worker_pb2.GetInfoResponse)
    store: kv_store_pb2.StatsResponse = field(default_factory=kv_store_pb2.StatsResponse)

    @property
    def max_concurrency(self) -> int:
        """Requests of the maximum length whose whole KV cache fits the device at once; 0: unknown."""
        if not self.worker.max_model_len:
            return 0
        return int(self.worker.slot_capacity_tokens // self.worker.max_model_len)


def gather_facts(endpoints: Endpoints, api_keys: Sequence[str]) -> Facts:
    """Ask all three. A process that does not answer leaves its fields empty: a banner never ends a server."""
    empty = Facts()
    with grpc.insecure_channel(f"unix:{endpoints.worker_socket}") as channel:
        worker_stub = gpu_worker_pb2_grpc.GPUWorkerStub(channel)
        worker = _or_else(
            empty.worker, lambda: worker_stub.GetInfo(gpu_worker_pb2.GetInfoRequest(), timeout=TIMEOUT_S)
        )
    with grpc.insecure_channel(f"unix:{endpoints.store_socket}") as channel:
        store_stub = kv_store_pb2_grpc.KVStoreStub(channel)
        store = _or_else(
            empty.store, lambda: store_stub.Stats(kv_store_pb2.StatsRequest(), timeout=TIMEOUT_S)
        )
    headers = {"Authorization": f"Bearer {api_keys[0]}"} if api_keys else {}
    with endpoints.client(TIMEOUT_S) as client:
        client.headers.update(headers)
        name = _or_else("", lambda: str(client.get("/v1/models").raise_for_status().json()["data"][0]["id"]))
        routes: tuple[str, ...] = _or_else(
            (), lambda: read_routes(client.get("/openapi.json").raise_for_status().json())
        )
    return Facts(name, routes, worker, store)


def read_routes(schema: dict[str, dict[str, dict[str, object]]]) -> tuple[str, ...]:
    """ "GET /health" and so on from an OpenAPI schema, in its order."""
    return tuple(
        f"{method.upper()} {path}" for path, operations in schema["paths"].items() for method in operations
    )


def _or_else(fallback: T, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except (grpc.RpcError, httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return fallback
