"""Options that several benchmarks share, and what their words mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.about import about
from benchmarks.figures import Report
from benchmarks.shapes import SHAPES, ModelShape
from carrel.process import command_line
from carrel.process.command_line import at_least, flag, new_file
from carrel.process.options import num_bytes
from gpu_worker.records import Budget

Found = TypeVar("Found")
Row = TypeVar("Row")


@dataclass(frozen=True)
class Workload:
    """`batch` sequences of `context` tokens; written 32768x24, or 32Kx24."""

    context: int
    batch: int

    def __str__(self) -> str:
        return f"{self.context}x{self.batch}"


DEFAULT_WORKLOADS = {
    "llama-3.1-8b": "32Kx1 32Kx8 32Kx24 128Kx1 128Kx6",
    "llama-3.1-8b-1m": "512Kx1",
    "llama-3.2-1b-1m": "1Mx1",
    "nano": "4Kx1 4Kx8",
    "tiny": "64x1 64x2",
}


def workload(text: str) -> Workload:
    context, separator, batch = text.lower().partition("x")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is no CONTEXTxBATCH, such as 32Kx24")
    return Workload(num_tokens(context), at_least(1)(batch))


def workloads_of(options: argparse.Namespace) -> list[Workload]:
    """Return the workloads that were named, or the shape's own."""
    named: list[Workload] | None = options.workloads
    return named or [workload(word) for word in DEFAULT_WORKLOADS[options.model_shape].split()]


def num_tokens(text: str) -> int:
    """A number of tokens from 1 up: 131072, 128K or 1M."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 1)
    digits = text if factor == 1 else text[:-1]
    if not digits.isdigit() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, such as 131072 or 128K")
    return int(digits) * factor


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1")
    return value


def budget(text: str) -> float | int:
    """A share of the prompt, or tokens: 0.2, 2048 or 2K."""
    return num_tokens(text) if text[-1:] in ("k", "K") else command_line.budget(text)


def add_output(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--json", "write everything measured here", parse=new_file, metavar="FILE")
    flag(parser, "--commit", "recorded where the code runs without its git folder", metavar="HASH")


def add_model(parser: argparse.ArgumentParser) -> None:
    flag(
        parser, "--model-shape", f"{', '.join(SHAPES)}", "llama-3.1-8b", metavar="NAME", choices=list(SHAPES)
    )
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--device", "auto, cpu, cuda", "auto", metavar="DEVICE")


def add_workloads(parser: argparse.ArgumentParser) -> None:
    flag(
        parser,
        "--workloads",
        "such as 32Kx24 128Kx6 (default: the shape's own)",
        parse=workload,
        metavar="CONTEXTxBATCH",
        nargs="+",
    )


def add_policies(parser: argparse.ArgumentParser) -> None:
    flag(
        parser,
        "--policies",
        "with options as bitkeys:rest=fitted,num_sink=8",
        ["full", "pqcache"],
        metavar="NAME",
    )
    flag(
        parser,
        "--budget",
        "tokens attended per KV head and layer, or a share of the context; full has none",
        2048,
        budget,
        metavar="SHARE|N",
    )


def budget_tokens(options: argparse.Namespace, policy: str, context: int) -> int | None:
    """The budget of a case; None for dense attention."""
    if policy == "full":
        return None
    amount = options.budget
    return (Budget(share=amount) if isinstance(amount, float) else Budget(tokens=amount)).resolve(context)


def add_memory_limit(parser: argparse.ArgumentParser) -> None:
    flag(
        parser,
        "--gpu-memory-limit",
        "use no more of the GPU's memory than this, such as 80GiB; dense rivals take the largest batch that fits",
        parse=num_bytes,
        metavar="SIZE",
    )


def finish(options: argparse.Namespace, device: str, shapes: dict[str, Any], rows: tuple[Any, ...]) -> Report:
    """The report of a run, written where the options say; also of one that is not over, with the rows so far."""
    report = Report(
        options.benchmark, about(options.argv, device, options.commit, options.load_average), shapes, rows
    )
    if options.json:
        report.write(options.json)
    return report


def keeper(
    options: argparse.Namespace, device: str, shape: ModelShape, rows_of: Callable[[list[Found]], list[Row]]
) -> Callable[[list[Found]], list[Row]]:
    """Writes the report of what was measured so far, and gives its rows."""

    def keep(outcomes: list[Found]) -> list[Row]:
        rows = rows_of(outcomes)
        finish(options, device, {shape.name: shape}, tuple(rows))
        return rows

    return keep
