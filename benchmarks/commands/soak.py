"""`carrel bench soak`: many mixed streams on a running server, aborts and sessions among them, and faults."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from benchmarks.commands.options import add_output, finish, num_tokens
from benchmarks.errors import BenchmarkError
from benchmarks.figures import revive
from benchmarks.load.client import LoadClient, RequestFailed
from benchmarks.load.processes import Server
from benchmarks.load.questions import questions
from benchmarks.load.soak import RECOVERY_S, Plan, Soak
from benchmarks.load.soak_row import Meter, SoakRow, Struck, Waits
from carrel import tables
from carrel.process.command_line import at_least, flag
from carrel.progress import RunProgress
from carrel.tables import Column
from kv_store.client.errors import StoreError
from kv_store.client.rpc import StoreRpc
from kv_store.v1 import kv_store_pb2 as pb

SERVER_POLICY = "server"
WORKER = "carrel_worker_"
# Of the worker's gauges and the store's, those that must be what they were once nobody asks.
WATCHED = ("running", "waiting", "slot_used_tokens")
STORED = ("reserved_bytes", "leased_bytes", "num_sequences", "num_sessions", "num_indexes")

FAULT_COLUMNS: tuple[Column[Struck], ...] = (
    Column("at", lambda fault: f"{fault.at_s / 60:.0f} min"),
    Column("what", lambda fault: f"{fault.who} {fault.how}", False),
    Column(
        "all serve after",
        lambda fault: "-" if fault.ready_s is None else f"{fault.ready_s - fault.at_s:.0f} s",
    ),
    Column("requests ended", lambda fault: str(fault.num_ended)),
    Column("first token before, p99", lambda fault: waits(fault.before)),
    Column("during", lambda fault: waits(fault.during)),
    Column("after", lambda fault: waits(fault.after)),
)
COLUMNS: tuple[Column[Meter], ...] = (
    Column("gauge", lambda meter: meter.name, False),
    Column("after a quarter", lambda meter: f"{meter.settled:,.0f}"),
    Column("most from then on", lambda meter: f"{meter.most:,.0f}"),
    Column("at the end", lambda meter: f"{meter.last:,.0f}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--url", "server", "http://127.0.0.1:8000", metavar=None)
    flag(parser, "--api-key", "default: CARREL_API_KEY", metavar="KEY")
    flag(parser, "--streams", "", 8, at_least(1))
    flag(parser, "--minutes", "", 10.0, float, metavar="M")
    flag(parser, "--questions", "asked alone first", 24, at_least(1))
    flag(parser, "--prompt-tokens", "at most", 2048, num_tokens)
    flag(
        parser,
        "--policies",
        f"of requests; {SERVER_POLICY} leaves it to the server",
        [SERVER_POLICY, "full", "snapkv"],
        metavar="NAME",
    )
    flag(
        parser,
        "--server",
        "of a carrel serve on this machine, to watch all its processes",
        parse=int,
        metavar="PID",
    )
    flag(
        parser,
        "--fault-every",
        "kill one of the --server's processes so often, or stop it for ever, each in turn (default: never)",
        0.0,
        float,
        metavar="S",
    )
    flag(parser, "--store", "of the KV store, to watch what it holds", metavar="ADDRESS")
    flag(parser, "--every", "between two looks", 5.0, float, metavar="S")
    flag(
        parser,
        "--near-tie",
        "an answer that leaves the one alone where its two best tokens were nearer differs by rounding",
        0.0,
        float,
        metavar="NATS",
    )
    flag(parser, "--seed", "", 1, int)
    flag(parser, "--timeout", "without a byte", 600.0, float, metavar="S")
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Returns 1 where a request failed, or was answered otherwise than alone. Raises BenchmarkError."""
    row, served = asyncio.run(_run(options))
    finish(options, device(), served, (row,))
    tables.show("soak", COLUMNS, row.meters, notes(row))
    return 1 if row.num_failed or row.num_differing else 0


def device() -> str:
    return "cuda" if shutil.which("nvidia-smi") else "cpu"


async def _run(options: argparse.Namespace) -> tuple[SoakRow, dict[str, Any]]:
    key = options.api_key or os.environ.get("CARREL_API_KEY")
    policies = tuple(None if name == SERVER_POLICY else name for name in options.policies)
    server = None if options.server is None else Server(options.server)
    if options.fault_every and server is None:
        raise BenchmarkError("--fault-every strikes the processes of a carrel serve: give its --server PID")
    if 0 < options.fault_every < RECOVERY_S:
        raise BenchmarkError(
            f"--fault-every {options.fault_every:g}: give at least {RECOVERY_S:g} s to recover"
        )
    plan = Plan(
        options.streams,
        60 * options.minutes,
        str(options.seed),
        options.every,
        options.fault_every,
        options.near_tie,
    )
    async with LoadClient(options.url, key, options.timeout) as client:
        model = await client.model()
        served = {"url": options.url, "model": model, "server": await client.about(), "policies": policies}
        asked = await questions(client, options.questions, options.prompt_tokens, policies, str(options.seed))
        store = StoreRpc(options.store, 5.0) if options.store else None

        async def gauges() -> dict[str, float]:
            found: dict[str, float] = {}
            with suppress(BenchmarkError):
                found |= worker_gauges(await client.text("/metrics"))
            if store is not None:
                with suppress(StoreError):
                    # also of one that was silent
                    stats = await asyncio.to_thread(store.wait, store.stub.Stats, pb.StatsRequest(), 5.0)
                    found |= {f"store {name}": float(getattr(stats, name)) for name in STORED}
            return found | (server.gauges() if server is not None else {})

        def keep(row: SoakRow) -> None:
            """Write the outcome so far, so that a run that ends early leaves it."""
            finish(options, device(), served, (row,))
            progress.tell(
                f"{row.ran_s / 60:.0f} min: {row.num_answered} answered, {row.num_ended} ended by a fault"
            )

        with RunProgress(options.streams) as progress:
            progress.doing("soak")
            try:
                row = await Soak(client, model, asked, plan, gauges, keep, server).run()
            except RequestFailed as error:
                raise BenchmarkError(f"a question alone was not answered: {error}") from error
    return row, served


def worker_gauges(metrics: str) -> dict[str, float]:
    """From the text of `/metrics`."""
    found = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if (gauge := name.partition("{")[0].removeprefix(WORKER)) in WATCHED and name.startswith(WORKER):
            found[gauge] = float(value)
    return found


def notes(row: SoakRow) -> Iterable[str]:
    """Describe the questions, and their outcomes."""
    yield (
        f"{row.num_streams} streams, {row.seconds / 60:g} minutes, {row.num_questions} questions: {row.num_answered} "
        f"answered, {row.num_aborted} aborted, {row.num_failed} failed, {row.num_differing} answered otherwise than "
        "alone"
    )
    if row.widest_tie is not None:
        yield f"{row.num_tied} left the answer alone at a near tie, of {row.widest_tie:.2f} nats at most"
    if row.faults:
        codes = ", ".join(f"{each.count} {each.code}" for each in row.endings)
        yield f"{len(row.faults)} faults ended {row.num_ended} requests: {codes or 'none'}"
    if row.first_difference is not None:
        yield f"the earliest difference after {100 * row.first_difference:.0f} % of an answer"
    if row.error:
        yield f"the first failure: {row.error}"


def render(content: dict[str, Any]) -> str:
    rows: Sequence[SoakRow] = [revive(SoakRow, fields) for fields in content["rows"]]
    parts = []
    for row in rows:
        parts.append(tables.markdown(COLUMNS, row.meters, notes(row)))
        if row.faults:
            parts.append(tables.markdown(FAULT_COLUMNS, row.faults))
    return "\n\n".join(parts)


def waits(found: Waits | None) -> str:
    """The 99th percentile, and of how many."""
    return "-" if found is None else f"{found.p99_s:.1f} s ({found.n})"
