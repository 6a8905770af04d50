"""The picture of a server that has just become ready."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from carrel.serve.children import Endpoints
from carrel.serve.facts import Facts

QUESTION = "In one sentence: what is a carrel?"


def banner(
    facts: Facts,
    endpoints: Endpoints,
    non_default: Mapping[str, str],
    version: str,
    commit: str,
    needs_key: bool,
) -> RenderableType:
    """Version, what is served and with which memory, the options that were given, routes and a request."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in banner_rows(facts, non_default):
        rows.add_row(name, escape(value))
    where = f"ready  {endpoints.url}   docs {endpoints.url}/docs"
    if endpoints.grpc_port:
        where += f"   gRPC {endpoints.host}:{endpoints.grpc_port}"
    return Group(
        Panel(rows, title=f"carrel {version} ({commit})", title_align="left", expand=False),
        Text(where, style="bold green", overflow="fold"),
        Text(curl(facts.served_name, endpoints.url, needs_key), overflow="fold", no_wrap=False),
    )


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


def curl(served_name: str, url: str, needs_key: bool) -> str:
    """A request to paste into a shell. The key is a variable there, never its value."""
    body = {"model": served_name or "carrel", "messages": [{"role": "user", "content": QUESTION}]}
    lines = [f"curl {url}/v1/chat/completions", "-H 'Content-Type: application/json'"]
    if needs_key:
        lines.append('-H "Authorization: Bearer $CARREL_API_KEY"')
    quoted = json.dumps(body).replace("'", "'\\''")
    return " \\\n  ".join([*lines, f"-d '{quoted}'"])


def _budget(facts: Facts) -> str:
    budget = facts.worker.default_budget
    if budget.WhichOneof("value") == "tokens":
        return f"{budget.tokens:,} tokens"
    return f"{budget.share:g} of the context" if budget.share else "the policy's own"
