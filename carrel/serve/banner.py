"""The banner of a server that has just become ready, and the facts in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import httpx
from rich.console import RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

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
    """Paths of an OpenAPI schema, in its order; `/docs` has their methods."""
    return tuple(schema["paths"])


def _or_else(fallback: T, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except (grpc.RpcError, httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return fallback


# short enough to paste, and of the kind that the bundled model answers
DOCUMENT = (
    "It rained all morning. The secret number of the amber fox is 48213. In the evening the boats came home."
)
QUESTION = "What is the secret number of the amber fox?"


def banner(facts: Facts, non_default: Mapping[str, str], version: str, commit: str) -> RenderableType:
    """Version, what is served and with which memory, the options that were given, and the routes."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in banner_rows(facts, non_default):
        rows.add_row(name, escape(value))
    return Panel(rows, title=f"carrel {version} ({commit})", title_align="left", expand=False)


def ready_lines(facts: Facts, endpoints: Endpoints, needs_key: bool) -> list[str]:
    """Where the server is, and a request to paste. To be printed without added line breaks."""
    where = f"ready  {endpoints.url}   docs {endpoints.url}/docs"
    if endpoints.uds is not None:
        where = f"ready  unix:{endpoints.uds}"
    if endpoints.grpc_port:
        where += f"   gRPC {endpoints.host}:{endpoints.grpc_port}"
    return [where, curl(facts.served_name, endpoints, needs_key)]


def banner_rows(facts: Facts, non_default: Mapping[str, str]) -> list[tuple[str, str]]:
    """Label and value of every line that is known."""
    worker, store = facts.worker, facts.store
    rows = []
    if worker.model:
        millions = worker.num_parameters / 1e6
        rows.append(("model", f"{worker.model} ({worker.model_type}, {millions:,.1f} M parameters)"))
    if facts.served_name:
        rows.append(("served as", facts.served_name))
    if worker.device:
        rows.append(("computes on", f"{worker.device}, {worker.dtype}"))
    if worker.max_model_len:
        rows.append(
            ("maximum length", f"{worker.max_model_len:,} tokens, {worker.max_num_seqs} requests at once")
        )
    if worker.default_policy:
        rows.append(("KV policy", f"{worker.default_policy}, budget {_budget(facts)}"))
    if worker.slot_capacity_tokens:
        rows.append(("KV on the device", f"{worker.slot_capacity_tokens:,} tokens"))
    if store.arena_bytes:
        rows.append(
            ("KV in the arena", f"{store.arena_bytes / 2**30:.2f} GiB of host memory ({worker.transport})")
        )
    if facts.max_concurrency:
        rows.append(
            (
                "max concurrency",
                f"for {worker.max_model_len:,} tokens = {facts.max_concurrency} wholly on the device",
            )
        )
    if non_default:
        rows.append(("options", "\n".join(f"{name} = {value}" for name, value in non_default.items())))
    if facts.routes:
        rows.append(("routes", "  ".join(facts.routes)))
    return rows


def curl(served_name: str, endpoints: Endpoints, needs_key: bool) -> str:
    """A request to paste into a shell. The key is a variable there, never its value."""
    messages = [{"role": "user", "content": f"{DOCUMENT}\n\n{QUESTION}"}]
    body = {"model": served_name or "carrel", "messages": messages, "max_tokens": 64}
    way = f"--unix-socket {endpoints.uds} " if endpoints.uds else ""
    lines = [f"curl {way}{endpoints.url}/v1/chat/completions", "-H 'Content-Type: application/json'"]
    if needs_key:
        lines.append('-H "Authorization: Bearer $CARREL_API_KEY"')
    quoted = json.dumps(body).replace("'", "'\\''")
    return " \\\n  ".join([*lines, f"-d '{quoted}'"])


def _budget(facts: Facts) -> str:
    budget = facts.worker.default_budget
    if budget.WhichOneof("value") == "tokens":
        return f"{budget.tokens:,} tokens"
    return f"{budget.share:g} of the context" if budget.share else "the policy's own"
