"""`carrel bench nodes`: a Ray cluster of two nodes beside one, all on this machine; with and without affinity."""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks import tables
from benchmarks.commands.options import add_output, finish, num_tokens
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Spread, revive
from benchmarks.load.client import LoadClient, RequestFailed
from benchmarks.load.levels import Level, RequestResult
from benchmarks.load.ray_cluster import WAIT_SECONDS, Nodes, ray_nodes
from benchmarks.progress import RunProgress
from benchmarks.tables import Column
from carrel.process.command_line import at_least

TIMEOUT_S = 600.0
OWN_TOKENS = 32
ANSWER_TOKENS = 8
SHORT_PROMPT = 64
SMALL = ("--arena-bytes", "2GiB", "--slot-memory", "1GiB", "--slab-bytes", "64KiB", "--hot-cache", "0.25")


@dataclass(frozen=True)
class Setup:
    """Nodes of one replica each. threads: of each replica's worker."""

    nodes: int
    threads: int
    affinity: bool


SETUPS = (Setup(1, 1, True), Setup(1, 2, True), Setup(2, 1, True), Setup(2, 1, False))


@dataclass(frozen=True)
class NodesRow:
    """load: "answers" (short prompts, long answers) or "documents" (asked before, then once more).

    cached_share: of the documents' tokens, how many were not computed again. by_prefix: requests sent where their
    document had been before, as the gateway counts.
    """

    setup: Setup
    load: str
    num_requests: int
    concurrency: int
    duration_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_ms: Spread
    cached_share: float | None
    by_prefix: int | None
    num_errors: int


COLUMNS: tuple[Column[NodesRow], ...] = (
    Column("load", lambda row: row.load, is_number=False),
    Column("nodes", lambda row: str(row.setup.nodes)),
    Column("threads each", lambda row: str(row.setup.threads)),
    Column("affinity", lambda row: "on" if row.setup.affinity else "off", is_number=False),
    Column("requests", lambda row: str(row.num_requests)),
    Column("at once", lambda row: str(row.concurrency)),
    Column("tokens/s", lambda row: f"{row.output_tokens_per_s:.1f}"),
    Column("prompt tokens/s", lambda row: f"{row.prompt_tokens_per_s:.0f}"),
    Column("first token, ms", lambda row: tables.spread(row.ttft_ms, 0)),
    Column("of known tokens found", lambda row: tables.number(row.cached_share, 2)),
    Column("errors", lambda row: str(row.num_errors)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, default, help in (
        ("--requests", 32, "of short prompts"),
        ("--output-tokens", 96, "of their answers"),
        ("--documents", 8, "different ones"),
        ("--asked", 4, "times that each is asked about, after a first one that is not counted"),
        ("--concurrency", 8, "requests at once"),
    ):
        parser.add_argument(
            flag, type=at_least(1), default=default, metavar="N", help=f"{help} (default: %(default)s)"
        )
    parser.add_argument(
        "--document-tokens", type=num_tokens, default=2048, metavar="N", help="of each (default: %(default)s)"
    )
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Raises BenchmarkError."""
    rows: list[NodesRow] = []
    with RunProgress(len(SETUPS)) as progress:
        for setup in SETUPS:
            progress.doing(f"{setup.nodes} nodes, {setup.threads} threads each")
            with ray_nodes(setup.nodes, setup.threads + 1) as nodes:
                url = deploy(nodes, setup)
                rows += asyncio.run(measure(url, setup, options))
            progress.done(
                "; ".join(f"{row.load}: {row.output_tokens_per_s:.1f} tokens/s" for row in rows[-2:])
            )
    rows.sort(key=lambda row: row.load)
    finish(options, "cpu", {"served": {"model": "carrel-nano", "policy": "pqcache"}}, tuple(rows))
    tables.show("nodes", COLUMNS, rows, notes(rows))
    return 0


def deploy(nodes: Nodes, setup: Setup) -> str:
    """The URL of a service with a replica on each node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes.carrel(
        *("deploy", "--port", str(port), "--grpc-port", "0", "--min-replicas", str(setup.nodes)),
        *("--cpus", str(setup.threads), "--store-cpus", "1", *SMALL),
        # what routing alone is worth
        *("--affinity", "true" if setup.affinity else "false"),
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + WAIT_SECONDS
    while counter(url, 'carrel_cluster_replicas{state="serving"}') < setup.nodes:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{setup.nodes} replicas do not serve after {WAIT_SECONDS:g} s")
        time.sleep(0.5)
    return url


def counter(url: str, name: str) -> float:
    """A value of /metrics; 0 when it is not there."""
    lines = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


async def measure(url: str, setup: Setup, options: argparse.Namespace) -> list[NodesRow]:
    at_once, rng = options.concurrency, random.Random(0)
    async with LoadClient(url, None, TIMEOUT_S) as client:
        warm = [await client.token_ids(SHORT_PROMPT, f"warm {number}") for number in range(2 * at_once)]
        await ask(client, warm, answers_level(options), at_once)
        short = [
            await client.token_ids(SHORT_PROMPT, f"short {number}") for number in range(options.requests)
        ]
        answers = await ask(client, short, answers_level(options), at_once)

        documents = [
            await client.token_ids(options.document_tokens, f"document {number}")
            for number in range(options.documents)
        ]
        first = [document + await client.token_ids(OWN_TOKENS, "first") for document in documents]
        await ask(client, first, documents_level(options), at_once)
        again = [
            document + await client.token_ids(OWN_TOKENS, f"question {number}")
            for number in range(options.asked)
            for document in rng.sample(documents, len(documents))
        ]
        name = 'carrel_cluster_routed_requests_total{by="prefix"}'
        before = await asyncio.to_thread(counter, url, name)
        asked = await ask(client, again, documents_level(options), at_once)
        by_prefix = int(await asyncio.to_thread(counter, url, name) - before)
    return [
        row_of(setup, "answers", at_once, answers, None, None),
        row_of(setup, "documents", at_once, asked, options.document_tokens, by_prefix),
    ]


def answers_level(options: argparse.Namespace) -> Level:
    return Level("pqcache", None, options.concurrency, SHORT_PROMPT, options.output_tokens, options.requests)


def documents_level(options: argparse.Namespace) -> Level:
    num_tokens, num_requests = options.document_tokens + OWN_TOKENS, options.documents * options.asked
    return Level("pqcache", None, options.concurrency, num_tokens, ANSWER_TOKENS, num_requests)


@dataclass(frozen=True)
class Answers:
    """What came of a list of prompts. duration_s: from the first question to the last answer."""

    results: tuple[RequestResult, ...]
    num_errors: int
    duration_s: float


async def ask(client: LoadClient, prompts: Sequence[list[int]], level: Level, at_once: int) -> Answers:
    """All prompts in their order, so many at a time."""
    waiting, results, errors = iter(prompts), [], []

    async def ask_until_done() -> None:
        for prompt in waiting:
            try:
                results.append(await client.complete("carrel-nano", prompt, level))
            except RequestFailed as exc:
                errors.append(str(exc))

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(ask_until_done())
    if not results:
        raise BenchmarkError(f"no request was answered: {errors[0]}")
    return Answers(tuple(results), len(errors), time.perf_counter() - begin)


def row_of(
    setup: Setup, load: str, at_once: int, answers: Answers, known_tokens: int | None, by_prefix: int | None
) -> NodesRow:
    """known_tokens: of each prompt, that were computed before; None: none."""
    results, duration_s = answers.results, answers.duration_s
    total: Callable[[str], int] = lambda name: sum(getattr(each, name) for each in results)  # noqa: E731
    return NodesRow(
        setup,
        load,
        len(results) + answers.num_errors,
        at_once,
        duration_s,
        total("completion_tokens") / duration_s,
        total("prompt_tokens") / duration_s,
        Spread.of(1000 * each.ttft_s for each in results),
        None if known_tokens is None else total("cached_tokens") / (known_tokens * len(results)),
        by_prefix,
        answers.num_errors,
    )


def notes(rows: Sequence[NodesRow]) -> Iterable[str]:
    for load in ("answers", "documents"):
        known = {row.setup: row for row in rows if row.load == load}
        two = known.get(Setup(2, 1, True))
        for threads in (1, 2):
            if two and (one := known.get(Setup(1, threads, True))):
                ratio = one.duration_s / two.duration_s
                yield f"{load}: two nodes of one thread do {ratio:.2f} x of one node of {threads}"
    yield "all nodes share the cores of one machine: two of them are no faster than its cores"


def render(content: dict[str, Any]) -> str:
    rows = [revive(NodesRow, fields) for fields in content["rows"]]
    return tables.markdown(COLUMNS, rows, notes(rows))
