"""`carrel bench siege`: random bodies, slow sockets, clients that never read and that leave, around an honest one."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from benchmarks.commands.options import add_output, finish, num_tokens
from benchmarks.commands.soak import device, worker_gauges
from benchmarks.figures import revive
from benchmarks.load.besiegers import Siege
from benchmarks.load.client import LoadClient
from benchmarks.load.processes import Server
from benchmarks.load.questions import Question
from benchmarks.load.siege import Honest, SiegeRow, run_siege
from carrel import tables
from carrel.process.command_line import at_least, flag
from carrel.progress import RunProgress
from carrel.tables import Column

# An honest client's p95 besieged, over that alone.
MOST = 2.0
PLACES = "carrel_gateway_requests_running"

COLUMNS: tuple[Column[SiegeRow], ...] = (
    Column("first token of the honest client", lambda row: f"besieged for {row.seconds / 60:g} min", False),
    Column("alone, p50 / p95", lambda row: _of(row, False)),
    Column("besieged, p50 / p95", lambda row: _of(row, True)),
    Column("p95 over alone", lambda row: tables.number(ratio(row), 2)),
    Column("its requests, failed", lambda row: f"{row.num_besieged}, {row.num_failed}"),
    Column("all free after", lambda row: "-" if row.free_after_s is None else f"{row.free_after_s:g} s"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--url", "server", "http://127.0.0.1:8000", metavar=None)
    flag(parser, "--api-key", "of the honest client; default: CARREL_API_KEY", metavar="KEY")
    flag(parser, "--other-key", "of all others", "", metavar="KEY")
    flag(parser, "--minutes", "", 5.0, float, metavar="M")
    flag(parser, "--alone", "of the honest client first", 60.0, float, metavar="S")
    flag(parser, "--prompt-tokens", "of the honest", 1024, num_tokens)
    for name, count, what in (
        ("bodies", 10_000, "random bodies, over the whole time"),
        ("slow", 1000, "sockets that say nothing, or a byte now and then"),
        ("unread", 256, "clients that never read their answer"),
        ("leaving", 200, "clients that leave before it is over"),
    ):
        flag(parser, f"--{name}", f"{what}", count, at_least(1))
    flag(parser, "--server", "of the carrel serve, to count its descriptors", parse=int, metavar="PID")
    flag(parser, "--seed", "", 1, int)
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Returns 1 where a target is missed. Raises BenchmarkError."""
    row, served = asyncio.run(_run(options))
    finish(options, device(), served, (row,))
    tables.show("siege", COLUMNS, (row,), notes(row))
    found = ratio(row)
    return (
        0
        if found is not None and found <= MOST and row.free_after_s is not None and not row.num_failed
        else 1
    )


async def _run(options: argparse.Namespace) -> tuple[SiegeRow, dict[str, Any]]:
    key = options.api_key or os.environ.get("CARREL_API_KEY")
    server = None if options.server is None else Server(options.server)
    async with LoadClient(options.url, key, 600.0) as client:
        model = await client.model()
        where = urlsplit(options.url)
        siege = Siege(
            where.hostname or "127.0.0.1",
            where.port or 80,
            options.other_key,
            model,
            60 * options.minutes,
            options.bodies,
            options.slow,
            options.unread,
            options.leaving,
            str(options.seed),
        )
        prompt = await client.token_ids(options.prompt_tokens, str(options.seed))
        honest = Honest(client, model, Question(tuple(prompt), None, 4))

        async def gauges() -> dict[str, float]:
            text = await client.text("/metrics")
            found = worker_gauges(text) | {"places": _places(text)}
            if server is not None:
                all_of = server.gauges()
                found |= {name: value for name, value in all_of.items() if name == "gateway descriptors"}
            return found

        with RunProgress(1) as progress:
            row = await run_siege(siege, honest, gauges, options.alone, progress.tell)
    counts = {name: getattr(options, name) for name in ("bodies", "slow", "unread", "leaving")}
    return row, {"url": options.url, "model": model, "prompt_tokens": options.prompt_tokens, **counts}


def _places(metrics: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(PLACES)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def ratio(row: SiegeRow) -> float | None:
    return None if row.alone is None or row.besieged is None else row.besieged.p95 / row.alone.p95


def _of(row: SiegeRow, is_besieged: bool) -> str:
    found = row.besieged if is_besieged else row.alone
    return "-" if found is None else f"{found.p50:.2f} / {found.p95:.2f} s"


def notes(row: SiegeRow) -> Iterable[str]:
    """Describe the answers that the attackers got, and what was left open."""
    if (other := row.repulse) is not None:
        told = ", ".join(f"{count} {status}" for status, count in other.statuses.items())
        yield f"{sum(other.statuses.values())} random bodies: {told}"
        yield (
            f"{other.num_slow} slow or idle connections, {other.num_unread} that never read, {other.num_left} that "
            f"left; {other.num_refused} broke off"
        )
    for name, (before, after) in row.gauges.items():
        yield f"{name}: {before:g} before, {after:g} afterwards"
    if row.load_average:
        yield f"load average of the machine: {row.load_average[0]:g} alone, {row.load_average[1]:g} besieged"
    if row.error:
        yield f"the honest client's first failure: {row.error}"


def render(content: dict[str, Any]) -> str:
    rows: Sequence[SiegeRow] = [revive(SiegeRow, fields) for fields in content["rows"]]
    return "\n".join(tables.markdown(COLUMNS, (row,), notes(row)) for row in rows)
