"""`carrel bench gather`: random rows between host memory and the GPU, and the other ways to move them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import plots, tables
from benchmarks.commands.options import add_device, add_output, finish
from benchmarks.device import choose_device
from benchmarks.figures import Spread, revive
from benchmarks.host_rows import HostRows, host_rows
from benchmarks.progress import RunProgress
from benchmarks.tables import Column
from benchmarks.timing import COLD_BYTES, in_turn, time_blocking, time_call
from carrel.process.command_line import at_least
from carrel.process.options import num_bytes
from gpu_worker.kernels.rows import gather_rows, scatter_rows

REPEATS = 10
# each has a staging buffer of its own
HOST_SETS = 4
# of the gather of 512-byte rows that lie within one layer of 128K tokens
TARGET_GB_PER_S, HOPED_GB_PER_S = 40.0, 46.0


@dataclass(frozen=True)
class GatherRow:
    """One way to move `num_rows` rows of `row_bytes` that lie at random within `region_bytes` of host memory."""

    way: str
    num_rows: int
    row_bytes: int
    region_bytes: int
    us: Spread
    gb_per_s: float


COLUMNS: tuple[Column[GatherRow], ...] = (
    Column("way", lambda row: row.way, False),
    Column("rows", lambda row: str(row.num_rows)),
    Column("row, bytes", lambda row: str(row.row_bytes)),
    Column("within, MiB", lambda row: f"{row.region_bytes / 2**20:.0f}"),
    Column("MiB", lambda row: f"{row.num_rows * row.row_bytes / 2**20:.2f}"),
    Column("us", lambda row: tables.spread(row.us, 1)),
    Column("GB/s", lambda row: f"{row.gb_per_s:.1f}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument(
        "--region",
        nargs="+",
        type=num_bytes,
        default=[512 << 20],
        metavar="SIZE",
        help="host memory in which the rows lie (default: 512MiB, one layer of 128K tokens)",
    )
    parser.add_argument(
        "--row-bytes",
        type=at_least(16),
        default=512,
        metavar="N",
        help="K and V of a token in a KV head; a multiple of 16 (default: %(default)s)",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        type=at_least(1),
        default=[10_000, 65_536, 1 << 20],
        metavar="N",
        help="moved at once, at most what the region holds (default: 10000 65536 1048576)",
    )
    parser.add_argument(
        "--threads",
        type=at_least(1),
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="of the host's way (default: all cores)",
    )
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Raises BenchmarkError."""
    device = choose_device(options.device)
    rows: list[GatherRow] = []
    counts = {region: _counts(options.rows, region // options.row_bytes) for region in options.region}
    with RunProgress(5 * sum(len(each) for each in counts.values())) as progress:
        for region, of_region in counts.items():
            with host_rows(region, device) as memory:
                for count in of_region:
                    for row in measure(memory, count, options.row_bytes, options.threads, device):
                        rows.append(row)
                        progress.done(f"{row.way}, {row.num_rows} rows: {row.gb_per_s:.1f} GB/s")
    finish(options, str(device), {}, tuple(rows))
    tables.show("gather", COLUMNS, rows, notes(rows, device.type))
    if options.plots:
        draw(rows, options.plots)
    return 0


def _counts(wanted: Sequence[int], available: int) -> list[int]:
    return list(dict.fromkeys(min(count, available) for count in wanted))


def measure(
    memory: HostRows, count: int, row_bytes: int, num_threads: int, device: torch.device
) -> Iterator[GatherRow]:
    """Every way for `count` distinct random rows; from call to call other ones, as far as there are more."""
    available, moved = memory.host.numel() // row_bytes, count * row_bytes
    shuffled = torch.randperm(available, generator=torch.Generator().manual_seed(count))
    num_sets = min(available // count, -(-COLD_BYTES // moved))
    sets = [shuffled[index * count : (index + 1) * count] for index in range(num_sets)]
    offsets = [(each * row_bytes).to(device) for each in sets]
    slots = torch.arange(count, device=device)
    pool = torch.zeros(count, row_bytes, dtype=torch.uint8, device=device)

    def row(way: str, us: Spread) -> GatherRow:
        return GatherRow(way, count, row_bytes, memory.host.numel(), us, moved / us.median / 1e3)

    def kernel(move: Callable[[Tensor, Tensor, Tensor, Tensor], None]) -> Spread:
        calls = [partial(move, memory.device, each, pool, slots) for each in offsets]
        return time_call(in_turn(calls), device)

    yield row("gather kernel", kernel(gather_rows))
    yield row("scatter kernel", kernel(scatter_rows))
    flat, contiguous = pool.view(-1), memory.host[:moved]
    yield row(
        "copy engine, host to device", time_call(partial(flat.copy_, contiguous, non_blocking=True), device)
    )
    yield row(
        "copy engine, device to host", time_call(partial(contiguous.copy_, flat, non_blocking=True), device)
    )
    rows = memory.host[: available * row_bytes].view(-1, row_bytes)
    with ThreadPoolExecutor(num_threads) as threads:
        calls = [host_path(rows, each, pool, threads, num_threads) for each in sets[:HOST_SETS]]
        way = f"gather by {num_threads} CPU threads, then copy"
        yield row(way, time_blocking(in_turn(calls), REPEATS, device))


def host_path(
    rows: Tensor, places: Tensor, pool: Tensor, threads: ThreadPoolExecutor, num_threads: int
) -> Callable[[], object]:
    """NumPy gathers into a staging buffer, pinned where there is a GPU; one copy takes that to the pool."""
    staging = torch.empty(pool.shape, dtype=pool.dtype, pin_memory=pool.device.type == "cuda")
    source, target = rows.numpy(), staging.numpy()
    parts = [part.numpy() for part in places.chunk(num_threads)]
    ends = list(accumulate(len(part) for part in parts))
    targets = [target[end - len(part) : end] for part, end in zip(parts, ends, strict=True)]

    def gather(part: Any, into: Any) -> None:
        # "clip" lets NumPy write to `out` without a buffer between
        source.take(part, axis=0, out=into, mode="clip")

    def move() -> None:
        list(threads.map(gather, parts, targets))
        pool.copy_(staging, non_blocking=True)

    return move


def notes(rows: Sequence[GatherRow], device: str) -> Iterator[str]:
    """The target, on a GPU: the best gather of 512-byte rows within one layer of 128K tokens."""
    speeds = [
        row.gb_per_s
        for row in rows
        if row.way == "gather kernel" and (row.row_bytes, row.region_bytes) == (512, 512 << 20)
    ]
    if speeds and device != "cpu":
        met = "met" if max(speeds) >= TARGET_GB_PER_S else "MISSED"
        hope = ", hoped for: reached" if max(speeds) >= HOPED_GB_PER_S else ""
        yield f"gather within one layer: {max(speeds):.1f} GB/s (target: at least {TARGET_GB_PER_S:.0f}): {met}{hope}"


def render(content: dict[str, Any]) -> str:
    rows = [revive(GatherRow, fields) for fields in content["rows"]]
    device = "cuda" if "gpu" in content["about"]["machine"] else "cpu"
    return tables.markdown(COLUMNS, rows, notes(rows, device))


def draw(rows: Sequence[GatherRow], folder: Path) -> None:
    series: plots.Series = {}
    for row in rows:
        name = f"{row.way}, {row.region_bytes / 2**20:.0f} MiB"
        series.setdefault(name, []).append((row.num_rows, row.gb_per_s))
    plots.lines(folder / "gather.png", "rows", "GB/s", series)
