"""`carrel bench serve`: load on a running server: clients in a loop, or classes of requests side by side."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from benchmarks.commands.options import add_output, budget, finish, num_tokens
from benchmarks.figures import revive
from benchmarks.load.client import LoadClient
from benchmarks.load.requests import Asked, Percentiles
from benchmarks.load.traffic import ClassRow, Slo, TrafficClass, run_traffic
from carrel import tables
from carrel.process.command_line import at_least, flag
from carrel.progress import RunProgress
from carrel.tables import Column

SERVER_POLICY = "server"
WARM_UP_TOKENS = 4
# Of the tokens: what comes in fewer pieces is not timed token by token.
LEAST_PIECES = 0.5

COLUMNS: tuple[Column[ClassRow], ...] = (
    Column("requests", lambda row: row.traffic.name, False),
    Column("policy", lambda row: row.policy or "the server's", False),
    Column("shared", lambda row: _tokens_or_dash(row.traffic.shared_tokens)),
    Column("opening", lambda row: _tokens_or_dash(row.traffic.opening_tokens)),
    Column("prompt", lambda row: tables.tokens(row.traffic.prompt_tokens)),
    Column("output", lambda row: str(row.traffic.max_tokens)),
    Column("turns", lambda row: str(row.traffic.turns)),
    Column("at once", lambda row: "-" if row.traffic.at_once is None else str(row.traffic.at_once)),
    Column("done", lambda row: f"{row.num_done}/{row.num_done + row.num_failed}"),
    Column("TTFT p50/p95/p99, ms", lambda row: _percentiles(row.ttft_ms, 0)),
    Column("of first turns", lambda row: _percentiles(row.first_ttft_ms, 0)),
    Column("of later turns", lambda row: _percentiles(row.later_ttft_ms, 0)),
    Column("gap p50/p95/p99, ms", lambda row: _percentiles(row.gap_ms, 1)),
    Column("gap p99.9, ms", lambda row: tables.number(row.gap_p999_ms, 0)),
    Column("TPOT p50/p95/p99, ms", lambda row: _percentiles(row.tpot_ms, 1)),
    Column("latency p50/p95/p99, ms", lambda row: _percentiles(row.latency_ms, 0)),
    Column("tokens/s", lambda row: f"{row.output_tokens_per_s:.1f}"),
    Column("prompt tokens/s", lambda row: f"{row.prompt_tokens_per_s:.0f}"),
    Column("cached tokens", lambda row: str(row.cached_tokens)),
    Column("attended", lambda row: tables.number(row.attended_tokens, 0)),
    Column("hit rate", lambda row: tables.number(row.hit_rate, 3)),
    Column("MiB moved", lambda row: "-" if row.bytes_moved is None else f"{row.bytes_moved / 2**20:.1f}"),
    Column("goodput, requests/s", lambda row: f"{row.goodput:.2f}"),
)


def traffic_class(text: str) -> TrafficClass:
    """As `TrafficClass.parse`; raises argparse.ArgumentTypeError."""
    try:
        return TrafficClass.parse(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Start the server with `carrel serve`; it must take prompts as token ids, as OpenAI's API has it."
    )
    flag(parser, "--url", "server", "http://127.0.0.1:8000", metavar=None)
    flag(parser, "--api-key", "default: CARREL_API_KEY", metavar="KEY")
    flag(parser, "--model", "default: the first that is served", metavar="NAME")
    flag(parser, "--policies", f"{SERVER_POLICY} leaves it to the server", [SERVER_POLICY], metavar="NAME")
    flag(parser, "--budget", "for all policies but full", parse=budget, metavar="SHARE|N")
    flag(parser, "--concurrency", "requests at once", [1, 4], at_least(1))
    flag(parser, "--prompt-tokens", "", [1024], num_tokens)
    flag(parser, "--shared-tokens", "of the prompts' start are the same in all", 0, at_least(0))
    flag(parser, "--max-tokens", "", 64, at_least(1))
    flag(
        parser,
        "--requests",
        "of each length and concurrency (default: 4 times --concurrency)",
        parse=at_least(1),
    )
    flag(parser, "--seed", "of the prompts", 1, int)
    flag(parser, "--timeout", "without a byte", 600.0, float, metavar="S")
    traffic = parser.add_argument_group("classes of requests side by side, in place of clients in a loop")
    flag(
        traffic,
        "--traffic",
        "NAME=PROMPT+OUTPUT@RATE arrives at random, RATE a second, such as chats=512+64@3; "
        "NAME=PROMPT+OUTPUTxCOUNT[/AT_ONCE] comes at the start, such as documents=100K+64x3 batch=16K+128x16/8; "
        "agents=8K~512+64*4@1: after 8,000 tokens that all share, in four turns; known=8K:512+64*4x3/1: after 8,000 of "
        "each conversation's own",
        [],
        traffic_class,
        metavar="CLASS",
    )
    flag(traffic, "--duration", "of arrivals", 12.0, float, metavar="S")
    flag(traffic, "--slo-ttft", "that goodput asks for", parse=float, metavar="MS")
    flag(traffic, "--slo-tpot", "likewise", parse=float, metavar="MS")
    parser.add_argument(
        "--api",
        choices=["carrel", "openai"],
        default="carrel",
        help="openai: any server of OpenAI's API; prompts are text of about as many tokens",
    )
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Returns 1 when no request was answered. Raises BenchmarkError."""
    rows, served = asyncio.run(_run(options))
    # the machine of the load, which is the server's too where both run on one
    finish(options, "cuda" if shutil.which("nvidia-smi") else "cpu", served, tuple(rows))
    tables.show("serve", COLUMNS, rows, notes(rows))
    return 0 if any(row.num_done for row in rows) else 1


async def _run(options: argparse.Namespace) -> tuple[list[ClassRow], dict[str, Any]]:
    """The rows, and what is served where."""
    key = options.api_key or os.environ.get("CARREL_API_KEY")
    slo, rows = Slo(options.slo_ttft, options.slo_tpot), []
    rounds = [(policy, *each) for policy in options.policies for each in rounds_of(options)]
    async with LoadClient(options.url, key, options.timeout, options.api == "carrel") as client:
        model = options.model or await client.model()
        served = {"url": options.url, "model": model, "server": await client.about()}
        with RunProgress(sum(_num_requests(options, each[1], each[2]) for each in rounds)) as progress:
            for policy, classes, seed in rounds:
                named = None if policy == SERVER_POLICY else policy
                asked = Asked(named, None if policy == "full" else options.budget, 1)
                progress.doing(f"{policy}: {', '.join(each.name for each in classes)}")
                if not options.traffic:
                    await _warm_up(client, model, classes[0], asked, seed)
                rows += await run_traffic(
                    client, model, classes, asked, options.duration, seed, slo, progress.advance
                )
                progress.tell(
                    f"{policy}, {rows[-1].traffic.name}: {rows[-1].output_tokens_per_s:.1f} tokens/s"
                )
    return rows, served


def rounds_of(options: argparse.Namespace) -> list[tuple[list[TrafficClass], str]]:
    """Classes that run side by side, and the seed of their prompts, one round after the other: those of `--traffic`, or
    a class of clients for every prompt length and concurrency."""
    if options.traffic:
        return [(options.traffic, str(options.seed))]
    sizes = [(length, at_once) for length in options.prompt_tokens for at_once in options.concurrency]
    return [
        (
            [
                TrafficClass(
                    "clients",
                    length - min(length, options.shared_tokens),
                    options.max_tokens,
                    count=options.requests or 4 * at_once,
                    at_once=at_once,
                    shared_tokens=min(length, options.shared_tokens),
                )
            ],
            f"{options.seed}:{index}",
        )
        for index, (length, at_once) in enumerate(sizes)
    ]


def _num_requests(options: argparse.Namespace, classes: Sequence[TrafficClass], seed: str) -> int:
    arrivals = (each.arrivals(options.duration, Random(f"{seed}:{each.name}")) for each in classes)
    return sum(each.turns * len(times) for each, times in zip(classes, arrivals, strict=True))


async def _warm_up(client: LoadClient, model: str, each: TrafficClass, asked: Asked, seed: str) -> None:
    """One request more, so that no round pays for what its first request sets up."""
    one = replace(each, count=1, at_once=1, max_tokens=min(each.max_tokens, WARM_UP_TOKENS))
    await run_traffic(client, model, [one], asked, 0.0, f"{seed}:warm-up", Slo(), lambda: None)


def notes(rows: Sequence[ClassRow]) -> Iterable[str]:
    """Count failures and answers that are not timed by tokens."""
    for row in rows:
        if row.num_failed:
            yield f"{row.traffic.name}: {row.num_failed} failed: {row.error}"
        yield from _piece_notes(row.traffic.name, row)


def _percentiles(values: Percentiles | None, digits: int) -> str:
    if values is None:
        return "-"
    return " / ".join(f"{value:.{digits}f}" for value in (values.p50, values.p95, values.p99))


def _tokens_or_dash(count: int) -> str:
    return tables.tokens(count) if count else "-"


def _piece_notes(name: str, row: ClassRow) -> Iterable[str]:
    """Note that a server sends several tokens in a piece, or no piece for a token without text."""
    num_tokens = round(row.output_tokens_per_s * row.duration_s)
    if row.num_pieces is not None and row.num_pieces < LEAST_PIECES * num_tokens:
        yield (
            f"{name}: {num_tokens} tokens came in {row.num_pieces} pieces of text: first tokens and the time between "
            "tokens are of pieces, not of tokens"
        )


def render(content: dict[str, Any]) -> str:
    rows = [revive(ClassRow, fields) for fields in content["rows"]]
    return tables.markdown(COLUMNS, rows, notes(rows))
