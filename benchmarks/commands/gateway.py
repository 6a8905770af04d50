"""`carrel bench gateway`: what a request costs the gateway's processor, with a worker that computes nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.commands.options import add_output, finish
from benchmarks.figures import revive
from benchmarks.load.gateway_cost import GatewayCost, GatewayLevel, GatewayRow, measure, running_gateway
from carrel import tables
from carrel.process.command_line import at_least, flag
from carrel.process.version import CHECKOUT
from carrel.progress import RunProgress
from carrel.serve.model import BUNDLED
from carrel.tables import Column

TEXT = CHECKOUT / "examples" / "documents" / "voyage-of-the-beagle.txt"
SHORT_WORDS = 16

COLUMNS: tuple[Column[GatewayRow], ...] = (
    Column("prompt", lambda row: str(row.prompt_tokens)),
    Column("output", lambda row: str(row.level.output_tokens)),
    Column("requests", lambda row: str(row.level.num_requests)),
    Column("at once", lambda row: str(row.level.concurrency)),
    Column("processor, ms a request", lambda row: f"{row.cpu_ms:.2f}"),
    Column("of one core", lambda row: f"{row.cpu_s / row.duration_s:.2f}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--model", "whose tokenizer is used (default: carrel-nano)", BUNDLED, Path, metavar="DIR")
    flag(parser, "--step-ms", "between two tokens of an answer", 10.0, float, metavar="MS")
    flag(parser, "--concurrency", "requests at once", 24, at_least(1))
    flag(parser, "--output-tokens", "of the long answers", 200, at_least(2))
    flag(parser, "--words", "of the long prompts", 20000, at_least(100))
    flag(parser, "--requests", "per level, four times as many of the shortest", 96, at_least(1))
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Raises BenchmarkError."""
    levels, words = levels_of(options), TEXT.read_text().split()
    rows = []
    with (
        running_gateway(options.model, options.step_ms) as gateway,
        RunProgress(sum(level.num_requests for level in levels)) as progress,
    ):
        for index, level in enumerate(levels):
            rows.append(measure(gateway, level, words, str(index), progress.advance))
            progress.tell(
                f"{rows[-1].prompt_tokens} + {level.output_tokens} tokens: {rows[-1].cpu_ms:.2f} ms"
            )
    served = {"model": options.model.resolve().name, "step_ms": options.step_ms}
    finish(options, "cpu", {"served": served, "cost": asdict(GatewayCost.of(*rows))}, tuple(rows))
    tables.show("gateway", COLUMNS, rows, notes(rows))
    return 0


def levels_of(options: argparse.Namespace) -> list[GatewayLevel]:
    """Short ones, those with long answers, those with long prompts: what GatewayCost is made of."""
    requests, at_once = options.requests, options.concurrency
    return [
        # processor time is counted in ticks of 10 ms
        GatewayLevel(SHORT_WORDS, 1, 4 * requests, at_once),
        GatewayLevel(SHORT_WORDS, options.output_tokens, requests, at_once),
        GatewayLevel(options.words, 1, requests, at_once),
    ]


def notes(rows: Sequence[GatewayRow]) -> Iterable[str]:
    cost = GatewayCost.of(*rows)
    yield (
        f"processor time: {cost.request_us:.0f} us a request, {cost.prompt_token_us:.2f} us a prompt token, "
        f"{cost.output_token_us:.0f} us a generated token"
    )
    yield f"one core streams {cost.output_tokens_per_s:.0f} tokens/s, prompts left out"


def render(content: dict[str, Any]) -> str:
    rows = [revive(GatewayRow, fields) for fields in content["rows"]]
    return tables.markdown(COLUMNS, rows, notes(rows))
