"""What `carrel bench hitrate` takes and shows of the papers' own caches."""

from __future__ import annotations

import argparse

from benchmarks import tables
from benchmarks.commands.options import num_tokens
from benchmarks.hitrate.block_cache import BLOCK_TOKENS
from benchmarks.hitrate.paper_caches import CLUSTERS, PAPER_CACHES, PaperCache, PaperCacheRow
from benchmarks.tables import Column
from carrel.process.command_line import at_least

PAPER_COLUMNS: tuple[Column[PaperCacheRow], ...] = (
    Column("context", lambda row: tables.tokens(row.case.context)),
    Column("policy", lambda row: row.case.policy, False),
    Column("budget", lambda row: row.case.budget_text),
    Column("selected", lambda row: str(row.num_selected)),
    Column("cache", lambda row: _paper_cache(row.cache), False),
    Column("holds", lambda row: f"{row.held_tokens:.0f}"),
    Column("tokens hit", lambda row: f"{row.tokens:.3f}"),
    Column("clusters hit", lambda row: tables.number(row.clusters, 3)),
    Column("tokens settled", lambda row: f"{row.tokens_settled:.3f}"),
    Column("clusters settled", lambda row: tables.number(row.clusters_settled, 3)),
)


def add_paper_caches(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--paper-caches",
        nargs="+",
        choices=PAPER_CACHES,
        default=[],
        metavar="NAME",
        help="the papers' own caches in a table of their own: clusters (ClusterKV's, of its selections only), "
        "lfu, lru (PQCache's, of blocks) (default: none)",
    )
    parser.add_argument(
        "--cluster-depths",
        nargs="+",
        type=at_least(1),
        default=[1, 2],
        metavar="R",
        help="steps whose clusters stay in ClusterKV's cache (default: 1 2)",
    )
    parser.add_argument(
        "--block-cache",
        type=block_cache,
        default=4096,
        metavar="TOKENS",
        help=f"size of PQCache's cache, of blocks of {BLOCK_TOKENS} tokens (default: 4K)",
    )
    parser.add_argument(
        "--k-cache",
        nargs="+",
        type=at_least(1),
        default=[32],
        metavar="N",
        help="blocks that PQCache's cache takes in after a step (default: 32)",
    )


def block_cache(text: str) -> int:
    """Tokens, a block of them at least."""
    size = num_tokens(text)
    if size < BLOCK_TOKENS:
        raise argparse.ArgumentTypeError(f"{text} tokens are less than a block of {BLOCK_TOKENS}")
    return size


def paper_caches_of(options: argparse.Namespace) -> list[PaperCache]:
    """Every named cache with every setting of its kind."""
    num_blocks = options.block_cache // BLOCK_TOKENS
    return [
        PaperCache(name, setting, 0 if name == CLUSTERS else num_blocks)
        for name in options.paper_caches
        for setting in (options.cluster_depths if name == CLUSTERS else options.k_cache)
    ]


def _paper_cache(cache: PaperCache) -> str:
    if cache.name == CLUSTERS:
        return f"clusters, R = {cache.setting}"
    return f"{cache.name.upper()} of {cache.num_blocks} blocks, k_cache = {cache.setting}"
