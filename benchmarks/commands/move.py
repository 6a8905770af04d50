"""`carrel bench move`: how long a prefix takes from one KV store to another."""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.commands.options import add_output, finish, num_tokens
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Spread, revive
from benchmarks.progress import RunProgress
from benchmarks.shapes import SHAPES, ModelShape
from benchmarks.store_child import running_peer
from benchmarks.tables import Column
from carrel.serve.flags import at_least
from kv_store.client import Layout, StoreClient
from kv_store.client.layout import ITEM_SIZES

SLAB_BYTES = 2 << 20
TIMEOUT_SECONDS = 600.0
UNIX, TCP = "Unix socket", "TCP on loopback, with a token"


@dataclass(frozen=True)
class MoveRow:
    """Moves of one prefix of `num_tokens` tokens, `num_bytes` of rows in all layers, from one process to another."""

    shape: str
    row_type: str
    num_tokens: int
    num_bytes: int
    way: str
    ms: Spread
    gb_per_s: float


COLUMNS: tuple[Column[MoveRow], ...] = (
    Column("shape", lambda row: f"{row.shape}, {row.row_type}", False),
    Column("tokens", lambda row: str(row.num_tokens)),
    Column("MiB", lambda row: f"{row.num_bytes / 2**20:.0f}"),
    Column("over", lambda row: row.way, False),
    Column("ms", lambda row: tables.spread(row.ms, 0)),
    Column("moves", lambda row: str(row.ms.n)),
    Column("GB/s", lambda row: f"{row.gb_per_s:.2f}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-shapes",
        nargs="+",
        choices=list(SHAPES),
        default=["nano", "llama-3.1-8b"],
        metavar="NAME",
        help=f"of {', '.join(SHAPES)} (default: nano llama-3.1-8b)",
    )
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=num_tokens,
        default=[4096],
        metavar="N",
        help="tokens of the prefix, rounded up to whole slabs (default: 4K)",
    )
    parser.add_argument(
        "--row-type",
        choices=list(ITEM_SIZES),
        default="bf16",
        metavar="NAME",
        help=f"{', '.join(ITEM_SIZES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=at_least(1),
        default=10,
        metavar="N",
        help="moves that count; one before them fills memory (default: %(default)s)",
    )
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Raises BenchmarkError."""
    rows: list[MoveRow] = []
    cases = [(SHAPES[name], context) for name in options.model_shapes for context in options.contexts]
    with RunProgress(2 * len(cases)) as progress:
        for shape, context in cases:
            for row in measure(shape, context, options.row_type, options.repeats):
                rows.append(row)
                progress.done(f"{shape.name}, {row.num_tokens} tokens, {row.way}: {row.ms.median:.0f} ms")
    finish(options, "cpu", {name: asdict(SHAPES[name]) for name in options.model_shapes}, tuple(rows))
    tables.show("move", COLUMNS, rows)
    return 0


def measure(shape: ModelShape, context: int, row_type: str, repeats: int) -> Iterator[MoveRow]:
    """One row for each way. Raises BenchmarkError when not all of the prefix came."""
    layout = Layout(shape.num_layers, shape.num_kv_heads, shape.head_dim, row_type)
    per_slab = 1 << (SLAB_BYTES // layout.token_bytes).bit_length() - 1
    num_slabs = -(-context // per_slab)
    num_bytes = num_slabs * per_slab * layout.token_bytes * layout.num_layers
    arena_bytes = num_slabs * layout.num_layers * SLAB_BYTES
    hashes = [secrets.token_bytes(32) for _ in range(num_slabs)]
    token = secrets.token_hex(16)
    with (
        running_peer(arena_bytes, 1, token) as (source, peer),
        running_peer(arena_bytes, 1, token) as (target, _),
        attached(source, layout) as giving,
        attached(target, layout) as taking,
    ):
        fill(giving, num_slabs * per_slab, hashes)
        for way, address in ((UNIX, source), (TCP, peer)):
            samples = []
            for repeat in range(1 + repeats):
                forget(taking, num_slabs * per_slab)
                started = time.perf_counter()
                pulled = taking.pull_prefix(address, hashes, TIMEOUT_SECONDS)
                seconds = time.perf_counter() - started
                if pulled.moved_bytes != num_bytes:
                    raise BenchmarkError(f"{pulled.moved_bytes} of {num_bytes} bytes came over {way}")
                if repeat:
                    samples.append(1e3 * seconds)
            ms = Spread.of(samples)
            speed = num_bytes / ms.median / 1e6
            yield MoveRow(shape.name, row_type, num_slabs * per_slab, num_bytes, way, ms, speed)


@contextmanager
def attached(target: str, layout: Layout) -> Iterator[StoreClient]:
    client = StoreClient.connect(target, layout, worker_id="bench", max_gather_rows=1, timeout_seconds=60.0)
    try:
        yield client
    finally:
        client.close()


def fill(client: StoreClient, num_tokens: int, hashes: list[bytes]) -> None:
    """Leave a prefix of random bytes in the store."""
    layout, generator = client.layout, np.random.default_rng(0)
    shape = (layout.num_kv_heads, num_tokens, layout.row_bytes)
    client.open_sequence("prefix")
    client.reserve("prefix", num_tokens)
    for layer in range(layout.num_layers):
        client.put("prefix", layer, 0, generator.integers(0, 256, shape, np.uint8))
    client.seal("prefix", num_tokens, prefix_hashes=hashes)
    client.release("prefix")


def forget(client: StoreClient, num_tokens: int) -> None:
    """Let the store give up its prefixes, for a sequence that needs all of the arena."""
    client.open_sequence("all")
    client.reserve("all", num_tokens)
    client.release("all")


def render(content: dict[str, Any]) -> str:
    return tables.markdown(COLUMNS, [revive(MoveRow, fields) for fields in content["rows"]])
