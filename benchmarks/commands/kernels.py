"""`carrel bench kernels`: every GPU kernel against the bytes it must move, a plain copy, and PyTorch's own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks.commands.options import (
    add_model,
    add_output,
    add_workloads,
    finish,
    num_tokens,
    workloads_of,
)
from benchmarks.device import choose_device, default_dtype, release
from benchmarks.figures import revive
from benchmarks.kernels import dense, groups, indexes, products, rows
from benchmarks.kernels.base import Ceilings, KernelCase, KernelRow, Setting, copy_ceilings, measure
from benchmarks.shapes import SHAPES
from carrel import tables
from carrel.process.command_line import flag
from carrel.progress import RunProgress
from carrel.tables import Column

OPERATIONS = dense.OPERATIONS | products.OPERATIONS | rows.OPERATIONS | indexes.OPERATIONS | groups.OPERATIONS
OPS = tuple(OPERATIONS)


def cases_of(op: str, setting: Setting) -> Iterator[KernelCase]:
    """The cases of one operation. Operands that its cases share are freed with them: take one after the other."""
    yield from OPERATIONS[op].cases(op, setting)


COLUMNS: tuple[Column[KernelRow], ...] = (
    Column("kernel", lambda row: row.op, False),
    Column("size", lambda row: row.label, False),
    Column("MiB", lambda row: f"{row.num_bytes / 2**20:.2f}"),
    Column("us", lambda row: row.us.text(1)),
    Column("TB/s", lambda row: f"{row.tb_per_s:.2f}"),
    Column("of a copy's", lambda row: f"{row.ceiling_share:.2f}"),
    Column("rival", lambda row: row.rival or "-", False),
    Column("its us", lambda row: row.rival_us.text(1) if row.rival_us else "-"),
    Column("x faster", lambda row: tables.number(row.rival_ratio, 2)),
    Column("error", lambda row: "-" if row.error is None else f"{row.error:.1e}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "On a CPU the references run, which shows that the benchmark works and nothing else."
    add_model(parser)
    add_workloads(parser)
    flag(parser, "--budget", "selected per KV head", 2048, num_tokens)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), metavar="OP", help=", ".join(OPS))
    parser.add_argument(
        "--warm",
        action="store_true",
        help="the same operands in every call, in the L2 cache where they fit (default: many in turn, so that none is)",
    )
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Returns 1 when a case failed. Raises BenchmarkError."""
    shape, device = SHAPES[options.model_shape], choose_device(options.device)
    workloads = tuple(workloads_of(options))
    setting = Setting(shape, workloads, options.budget, device, default_dtype(device))
    rows: list[KernelRow] = []
    failed: list[str] = []
    with RunProgress(1 + sum(1 for op in options.ops for _ in cases_of(op, setting))) as progress:
        progress.doing("copies")
        ceilings = copy_ceilings(device)
        progress.done(_ceilings(ceilings))
        for case in (case for op in options.ops for case in cases_of(op, setting)):
            progress.doing(f"{case.op} {case.label}")
            release(device)
            try:
                row = measure(case, device, ceilings, options.warm)
            except Exception as exc:
                # one kernel that fails does not cost the others' figures
                failed.append(
                    f"{case.op} {case.label}: {type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
                )
                progress.done(failed[-1])
                continue
            rows.append(row)
            progress.done(f"{row.op}, {row.label}: {row.us.median:.1f} us, {row.tb_per_s:.2f} TB/s")
    finish(options, str(device), {shape.name: shape, "copies": ceilings}, tuple(rows))
    tables.show("kernels", COLUMNS, rows, [_ceilings(ceilings), *failed])
    return 1 if failed else 0


def _ceilings(found: Ceilings) -> str:
    return f"plain copies: {found.tb_per_s:.2f} TB/s on the device, {1e3 * found.from_host_tb_per_s:.1f} GB/s to it"


def render(content: dict[str, Any]) -> str:
    rows = [revive(KernelRow, fields) for fields in content["rows"]]
    copies = revive(Ceilings, content["shapes"]["copies"])
    return tables.markdown(COLUMNS, rows, [_ceilings(copies)])
