"""`carrel bench soak`: many mixed streams on a running server, aborts and sessions among them."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.commands.options import add_output, finish, num_tokens
from benchmarks.errors import BenchmarkError
from benchmarks.figures import revive
from benchmarks.load.client import LoadClient, RequestFailed
from benchmarks.load.soak import Meter, SoakRow, questions, run_soak
from benchmarks.progress import RunProgress
from benchmarks.tables import Column
from carrel.process.command_line import at_least
from kv_store.client.rpc import StoreRpc
from kv_store.v1 import kv_store_pb2 as pb

SERVER_POLICY = "server"
WORKER = "carrel_worker_"
# Of the worker's gauges and the store's, those that must be what they were once nobody asks.
WATCHED = ("running", "waiting", "slot_used_tokens")
STORED = ("reserved_bytes", "leased_bytes", "num_sequences", "num_sessions", "num_indexes")

COLUMNS: tuple[Column[Meter], ...] = (
    Column("gauge", lambda meter: meter.name, False),
    Column("after a quarter", lambda meter: f"{meter.settled:,.0f}"),
    Column("most from then on", lambda meter: f"{meter.most:,.0f}"),
    Column("at the end", lambda meter: f"{meter.last:,.0f}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server (default: %(default)s)")
    parser.add_argument("--api-key", default=None, metavar="KEY", help="default: CARREL_API_KEY")
    parser.add_argument("--streams", type=at_least(1), default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="default: %(default)s")
    parser.add_argument(
        "--questions",
        type=at_least(1),
        default=24,
        metavar="N",
        help="asked alone first (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-tokens", type=num_tokens, default=2048, metavar="N", help="at most (default: %(default)s)"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        default=[SERVER_POLICY, "full", "snapkv"],
        metavar="NAME",
        help=f"of requests; {SERVER_POLICY} leaves it to the server (default: %(default)s)",
    )
    parser.add_argument(
        "--process",
        nargs="+",
        type=_process,
        default=[],
        metavar="NAME=PID",
        help="of the server's processes on this machine, to watch their memory and descriptors",
    )
    parser.add_argument(
        "--store", default=None, metavar="ADDRESS", help="of the KV store, to watch what it holds"
    )
    parser.add_argument(
        "--every", type=float, default=5.0, metavar="S", help="between two looks (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="without a byte (default: %(default)s)"
    )
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Returns 1 where a request failed, or was answered otherwise than alone. Raises BenchmarkError."""
    row, served = asyncio.run(_run(options))
    finish(options, "cuda" if shutil.which("nvidia-smi") else "cpu", served, (row,))
    tables.show("soak", COLUMNS, row.meters, notes(row))
    return 1 if row.num_failed or row.num_differing else 0


async def _run(options: argparse.Namespace) -> tuple[SoakRow, dict[str, Any]]:
    key = options.api_key or os.environ.get("CARREL_API_KEY")
    policies = tuple(None if name == SERVER_POLICY else name for name in options.policies)
    async with LoadClient(options.url, key, options.timeout) as client:
        model = await client.model()
        served = {"url": options.url, "model": model, "server": await client.about(), "policies": policies}
        asked = await questions(client, options.questions, options.prompt_tokens, policies, str(options.seed))
        store = StoreRpc(options.store, 5.0) if options.store else None

        async def gauges() -> dict[str, float]:
            found = worker_gauges(await client.text("/metrics"))
            if store is not None:
                stats = await asyncio.to_thread(store.call, store.stub.Stats, pb.StatsRequest())
                found |= {f"store {name}": float(getattr(stats, name)) for name in STORED}
            for name, pid in options.process:
                found |= {f"{name} {what}": value for what, value in process_gauges(pid).items()}
            return found

        with RunProgress(options.streams) as progress:

            def tell(row: SoakRow) -> None:
                progress.doing(f"{row.num_answered} answered, {row.num_failed} failed")

            try:
                row = await run_soak(
                    client,
                    model,
                    asked,
                    options.streams,
                    60 * options.minutes,
                    str(options.seed),
                    gauges,
                    tell,
                    options.every,
                )
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


def process_gauges(pid: int) -> dict[str, float]:
    """Descriptors, and MiB of memory of its own, which a shared arena is no part of. None of a process that is gone."""
    folder = Path("/proc") / str(pid)
    try:
        fields = dict(
            line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
        )
        descriptors = len(list((folder / "fd").iterdir()))
    except OSError:
        return {}
    return {"own MiB": int(fields["RssAnon"].split()[0]) / 1024, "descriptors": descriptors}


def _process(text: str) -> tuple[str, int]:
    name, _, pid = text.partition("=")
    if not name or not pid.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=PID, such as worker=4711")
    return name, int(pid)


def notes(row: SoakRow) -> Iterable[str]:
    """What was asked, and what came of it."""
    yield (
        f"{row.num_streams} streams, {row.seconds / 60:g} minutes, {row.num_questions} questions: {row.num_answered} "
        f"answered, {row.num_aborted} aborted, {row.num_failed} failed, {row.num_differing} answered otherwise than "
        "alone"
    )
    if row.first_difference is not None:
        yield f"the earliest difference after {100 * row.first_difference:.0f} % of an answer"
    if row.error:
        yield f"the first failure: {row.error}"


def render(content: dict[str, Any]) -> str:
    rows: Sequence[SoakRow] = [revive(SoakRow, fields) for fields in content["rows"]]
    return "\n".join(tables.markdown(COLUMNS, row.meters, notes(row)) for row in rows)
