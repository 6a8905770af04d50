"""The banner of a server that has just become ready."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rich.console import RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from carrel.serve.children import Endpoints
from carrel.serve.facts import Facts

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
