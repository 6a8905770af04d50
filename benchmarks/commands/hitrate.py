"""`carrel bench hitrate`: how often the hot cache hits on real text, by its size, beside LRU and the papers' caches."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import plots, tables
from benchmarks.commands.options import add_device, add_output, budget, finish, num_tokens
from benchmarks.commands.paper_caches import PAPER_COLUMNS, add_paper_caches, paper_caches_of
from benchmarks.device import choose_device
from benchmarks.errors import BenchmarkError
from benchmarks.figures import revive
from benchmarks.hitrate.paper_caches import CLUSTERS, PaperCacheRow, paper_rows_of
from benchmarks.hitrate.rates import HitRateCase, HitRateRow, rows_of, trace_of
from benchmarks.hitrate.recorded_policies import RECORDED
from benchmarks.hitrate.recorder import Recorder
from benchmarks.hitrate.texts import TextSource, cut_documents, load_tokenizer, read_text
from benchmarks.progress import RunProgress
from benchmarks.tables import Column
from carrel.evaluation.about import hash_files, model_files
from carrel.process.command_line import at_least
from carrel.process.version import CHECKOUT

MODEL = CHECKOUT / "models" / "carrel-nano"
TEXT = CHECKOUT / "examples" / "documents" / "voyage-of-the-beagle.txt"
CACHES = [Fraction(1, 2**power) for power in range(5, -1, -1)]

COLUMNS: tuple[Column[HitRateRow], ...] = (
    Column("context", lambda row: tables.tokens(row.case.context)),
    Column("policy", lambda row: row.case.policy, False),
    Column("budget", lambda row: row.case.budget_text),
    Column("selected", lambda row: str(row.num_selected)),
    Column("of the step before", lambda row: f"{row.overlap:.3f}"),
    Column("C", lambda row: _share(row.cache_share)),
    Column("tokens", lambda row: str(row.cache_tokens)),
    Column("hit rate", lambda row: f"{row.clock:.3f}"),
    Column("LRU", lambda row: f"{row.lru:.3f}"),
    Column("settled", lambda row: f"{row.clock_settled:.3f}"),
    Column("LRU settled", lambda row: f"{row.lru_settled:.3f}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        metavar="DIR",
        help="with weights and tokenizer.json (default: carrel-nano)",
    )
    add_device(parser)
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=[TEXT],
        metavar="FILE",
        help="books from which documents are cut in turn, .txt or .txt.xz (default: the example's)",
    )
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=num_tokens,
        default=[8192],
        metavar="N",
        help="such as 8K 16K (default: 8K)",
    )
    parser.add_argument(
        "--documents", type=at_least(1), default=2, metavar="N", help="per context (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=at_least(2),
        default=128,
        metavar="N",
        help="tokens of each document that are decoded, those after its context (default: %(default)s)",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=list(RECORDED),
        default=["pqcache", "clusterkv"],
        metavar="NAME",
        help=f"{', '.join(RECORDED)} (default: pqcache clusterkv)",
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=budget,
        default=[0.02, 0.05, 0.1],
        metavar="SHARE|N",
        help="default: 0.02 0.05 0.1",
    )
    parser.add_argument(
        "--caches",
        nargs="+",
        type=cache_share,
        default=CACHES,
        metavar="SHARE",
        help="C of the context, such as 1/8 (default: 1/32 to 1)",
    )
    add_paper_caches(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        default=None,
        metavar="FILE",
        help="write what was selected, for `carrel bench decode --trace`; of one context, policy and budget",
    )
    add_output(parser)


def cache_share(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share in (0, 1], such as 1/8")
    return value


def run(options: argparse.Namespace) -> int:
    """Raises BenchmarkError."""
    device, cases = choose_device(options.device), cases_of(options)
    if options.trace and len(cases) > 1:
        raise BenchmarkError("--trace takes one context, policy and budget: name one of each")
    if CLUSTERS in options.paper_caches and "clusterkv" not in options.policies:
        raise BenchmarkError("--paper-caches clusters holds what clusterkv selects: name it in --policies")
    tokenizer = load_tokenizer(options.model)
    texts = [read_text(path, tokenizer) for path in options.text]
    documents = {
        context: cut_documents(texts, options.documents, context + options.steps)
        for context in options.contexts
    }
    shares, paper_caches = [float(share) for share in options.caches], paper_caches_of(options)
    rows: list[HitRateRow] = []
    paper_rows: list[PaperCacheRow] = []
    with Recorder(options.model, device) as recorder, RunProgress(len(cases)) as progress:
        served = _served(options.model, recorder, [text.source for text in texts])
        for context, of_context in groupby(cases, key=lambda case: case.context):
            for case in of_context:
                progress.doing(str(case))
                recording = recorder.record(case.policy, case.budget, documents[context], case.steps)
                found = rows_of(case, recording, shares)
                progress.done(f"{case}: {_curve(found)}")
                rows += found
                paper_rows += paper_rows_of(case, recording, paper_caches)
                if options.trace:
                    trace_of(recording).save(options.trace)
            recorder.forget()
    finish(options, str(device), served, (*rows, *paper_rows))
    tables.show("hitrate", COLUMNS, rows, notes(rows))
    if paper_rows:
        print()
        tables.show("papers' own caches", PAPER_COLUMNS, paper_rows)
    if options.plots:
        draw(rows, options.plots)
    return 0


def cases_of(options: argparse.Namespace) -> list[HitRateCase]:
    """Every budget of every policy at every context."""
    return [
        HitRateCase(policy, amount, context, options.documents, options.steps)
        for context in options.contexts
        for policy in options.policies
        for amount in options.budgets
    ]


def _served(model: Path, recorder: Recorder, texts: Sequence[TextSource]) -> dict[str, Any]:
    config = recorder.model.config
    sizes = {
        "sha256": hash_files(model_files(model)),
        "dtype": str(recorder.model.decoder.dtype).removeprefix("torch."),
        "num_layers": config.num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }
    return {model.resolve().name: sizes, "texts": list(texts)}


def notes(rows: Sequence[HitRateRow]) -> Iterable[str]:
    """What C was raised for, and how close the clock comes to LRU."""
    if any(row.cache_tokens > row.cache_share * row.case.context + 1 for row in rows):
        yield "C is never below what is selected: smaller shares were raised to that."
    worst = max(rows, key=lambda row: row.lru - row.clock)
    yield (
        f"The clock is at most {worst.lru - worst.clock:.3f} below LRU ({worst.case}, C {_share(worst.cache_share)})."
    )


def render(content: dict[str, Any]) -> str:
    rows = [revive(HitRateRow, fields) for fields in content["rows"] if "cache" not in fields]
    paper_rows = [revive(PaperCacheRow, fields) for fields in content["rows"] if "cache" in fields]
    hot = tables.markdown(COLUMNS, rows, notes(rows))
    return f"{hot}\n\n{tables.markdown(PAPER_COLUMNS, paper_rows)}" if paper_rows else hot


def draw(rows: Sequence[HitRateRow], folder: Path) -> None:
    """A PNG for each context."""
    for context in dict.fromkeys(row.case.context for row in rows):
        clock: plots.Series = {}
        lru: plots.Series = {}
        for row in rows:
            if row.case.context == context:
                name = f"{row.case.policy} {row.case.budget_text}"
                clock.setdefault(name, []).append((row.cache_share, row.clock))
                lru.setdefault(name, []).append((row.cache_share, row.lru))
        x_label = f"hot cache, of {tables.tokens(context)} tokens"
        plots.lines(
            folder / f"hitrate_{context}.png",
            x_label,
            "hit rate (dashed: LRU)",
            clock,
            tick=_share,
            beside=lru,
        )


def _curve(rows: Sequence[HitRateRow]) -> str:
    return ", ".join(f"{_share(row.cache_share)} {row.clock:.3f}" for row in rows)


def _share(share: float) -> str:
    return str(Fraction(share).limit_denominator(1000))
