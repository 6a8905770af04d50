"""The banner of a server that has just become ready, and the facts in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import grpc
from rich.console import RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from carrel.serve.endpoints import Endpoints
from gpu_worker.v1 import gpu_worker_pb2, gpu_worker_pb2_grpc
from kv_store.v1 import kv_store_pb2, kv_store_pb2_grpc

TIMEOUT_S = 5.0
# short enough to paste, and of the kind that the bundled model answers
DOCUMENT = (
    "It rained all morning. The secret number of the amber fox is 48213. In the evening the boats came home."
)
QUESTION = "What is the secret number of the amber fox?"


@dataclass(frozen=True)
class Facts:
    """Empty fields are unknown; the banner leaves them out."""

    served_name: str = ""
    worker: gpu_worker_pb2.GetInfoResponse = field(default_factory=gpu_worker_pb2.GetInfoResponse)
    store: kv_store_pb2.StatsResponse = field(default_factory=kv_store_pb2.StatsResponse)


def gather_facts(endpoints: Endpoints, served_name: str) -> Facts:
    """Ask worker and store. One that does not answer leaves its field empty: a banner never ends a server."""
    with (
        grpc.insecure_channel(f"unix:{endpoints.worker_socket}") as to_worker,
        grpc.insecure_channel(f"unix:{endpoints.store_socket}") as to_store,
    ):
        info = gpu_worker_pb2_grpc.GPUWorkerStub(to_worker).GetInfo
        stats = kv_store_pb2_grpc.KVStoreStub(to_store).Stats
        facts = Facts(served_name)
        with suppress(grpc.RpcError):
            facts = replace(facts, worker=info(gpu_worker_pb2.GetInfoRequest(), timeout=TIMEOUT_S))
        with suppress(grpc.RpcError):
            facts = replace(facts, store=stats(kv_store_pb2.StatsRequest(), timeout=TIMEOUT_S))
        return facts


def banner(facts: Facts, non_default: Mapping[str, str], version: str, commit: str) -> RenderableType:
    """Version, what is served and with which memory, and the options that were given."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    worker, arena = facts.worker, facts.store.arena_bytes / 2**30
    length, slots = worker.max_model_len, worker.slot_capacity_tokens
    size = f"{worker.num_parameters / 1e6:,.1f} M parameters"
    whole, offloaded = slots // length if length else 0, worker.context_capacity
    known: list[tuple[str, object, str]] = [
        ("model", worker.model, f"{worker.model} ({worker.model_type}, {size})"),
        ("served as", facts.served_name, facts.served_name),
        ("computes on", worker.device, f"{worker.device}, {worker.dtype}"),
        ("maximum length", length, f"{length:,} tokens, {worker.max_num_seqs} requests at once"),
        ("KV policy", worker.default_policy, f"{worker.default_policy}, budget {_budget(worker)}"),
        ("KV on the device", slots, f"{slots:,} tokens"),
        ("KV in the arena", arena, f"{arena:.2f} GiB of host memory ({worker.transport})"),
        (
            "max concurrency",
            whole or offloaded,
            f"of {length:,} tokens: {whole} wholly on the device, {offloaded} with the arena",
        ),
        ("options", non_default, "\n".join(f"{name} = {value}" for name, value in non_default.items())),
    ]
    for label, is_known, text in known:
        if is_known:
            rows.add_row(label, escape(text))
    return Panel(rows, title=f"carrel {version} ({commit})", title_align="left", expand=False)


def _budget(worker: gpu_worker_pb2.GetInfoResponse) -> str:
    budget = worker.default_budget
    if budget.WhichOneof("value") == "tokens":
        return f"{budget.tokens:,} tokens"
    return f"{budget.share:g} of the context" if budget.share else "the policy's own"


def ready_lines(facts: Facts, endpoints: Endpoints, needs_key: bool, has_page: bool = True) -> list[str]:
    """Where the server is, the page first, and a request to paste. To be printed without added line breaks."""
    url = endpoints.url
    where = f"ready  {url} (the page)   docs {url}/docs   API {url}/v1" if has_page else f"ready  {url}/v1"
    if endpoints.uds is not None:
        where = f"ready  unix:{endpoints.uds}"
    if endpoints.grpc_port:
        where += f"   gRPC {endpoints.host}:{endpoints.grpc_port}"
    return [where, curl(facts.served_name, endpoints, needs_key)]


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
