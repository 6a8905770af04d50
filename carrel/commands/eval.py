"""`carrel eval`: the quality table. Every policy and budget answers the same questions as dense attention."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from carrel.errors import EvaluationError, OptionError
from carrel.evaluation.about import describe, hash_files, model_files
from carrel.evaluation.cells import ALL, PROTOCOLS, Cell, is_tokens, name_policies, plan_cells
from carrel.evaluation.corpus import CorpusError, book_paths
from carrel.evaluation.local import STORE_RUNTIMES, LocalOptions, local_worker
from carrel.evaluation.progress import RunProgress
from carrel.evaluation.record import Report, Source, read_report, require_same_source
from carrel.evaluation.runner import Runner
from carrel.evaluation.suite import ANSWER_TOKENS, TASKS, load_suite
from carrel.evaluation.table import markdown_table, rich_table, verdicts
from carrel.evaluation.worker_client import WorkerClient
from carrel.serve.flags import num_bytes
from carrel.serve.model import find_model
from gpu_worker.v1 import gpu_worker_pb2

T = TypeVar("T")
REMOTE_HOT_CACHE = "the worker's own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Lengths count prompt and answer together. docs/evaluation.md says how to read the table."
    parser.add_argument("--model", default=None, metavar="DIR", help="model directory (default: carrel-nano)")
    parser.add_argument(
        "--books", type=Path, default=None, metavar="DIR", help="folder that holds heldout/*.txt.xz"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=list(TASKS),
        default=["mixed"],
        metavar="TASK",
        help="mixed (1 of 16 facts), needle (one fact) (default: mixed)",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=_least(256),
        default=[4096, 8192],
        metavar="N",
        help="tokens of prompt and answer (default: 4096 8192)",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["full", "oracle", "pqcache", "clusterkv"],
        metavar="NAME",
        help="any of the worker's; all: every one that wraps no other (default: full oracle pqcache clusterkv)",
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=_budget,
        default=[0.2, 0.1],
        metavar="SHARE|N",
        help="share of the prefilled tokens attended, or from 2 up their number; full has none (default: 0.2 0.1)",
    )
    parser.add_argument(
        "--protocols",
        nargs="+",
        choices=PROTOCOLS,
        default=list(PROTOCOLS),
        metavar="P",
        help="P1 prefills the question too, P2 decodes it (default: P1 P2)",
    )
    parser.add_argument(
        "--documents", type=_least(1), default=100, metavar="N", help="per cell (default: 100)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the questions (default: 1)")
    parser.add_argument(
        "--shard",
        type=_shard,
        default=(0, 1),
        metavar="I/N",
        help="only every N-th document, from the I-th (from 0)",
    )
    parser.add_argument(
        "--json", type=Path, default=None, metavar="FILE", help="write everything measured here"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what --json FILE already holds")
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        default=None,
        metavar="FILE",
        help="run nothing: join the reports of shards, show them and write --json",
    )
    parser.add_argument(
        "--no-measure",
        dest="measure",
        action="store_false",
        help="no attention mass and recall rate, which slow decoding; then its time is compared",
    )
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="per answer (default: 900)")
    parser.add_argument(
        "--concurrency",
        type=_least(1),
        default=None,
        metavar="N",
        help="questions at once (default: what the worker runs at once)",
    )
    parser.add_argument(
        "--worker",
        default=None,
        metavar="ADDRESS",
        help="use a running worker (unix:PATH or HOST:PORT) instead of an own one",
    )
    own = parser.add_argument_group("the worker and store that are started without --worker")
    own.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N")
    own.add_argument(
        "--dtype", default=None, metavar="TYPE", help="default: float32 on a CPU, else the model's"
    )
    own.add_argument(
        "--hot-cache",
        default="0.25",
        metavar="SHARE|N|auto",
        help="slots for selected tokens; auto takes all memory, so nothing is moved (default: 0.25)",
    )
    own.add_argument("--max-num-seqs", type=_least(1), default=None, metavar="N")
    own.add_argument("--threads", type=_least(1), default=None, metavar="N", help="of the worker, on a CPU")
    own.add_argument(
        "--slot-memory",
        type=num_bytes,
        default=None,
        metavar="SIZE",
        help="device memory for the KV cache (default: the worker's own)",
    )
    own.add_argument(
        "--arena-bytes",
        type=num_bytes,
        default=None,
        metavar="SIZE",
        help="host memory for the KV cache (default: the store's own)",
    )
    own.add_argument(
        "--store-runtime",
        choices=STORE_RUNTIMES,
        default="process",
        help="where the store runs (default: process)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Tables go to stdout, progress to stderr. Returns 0 whatever the quality; raises CarrelError."""
    notes = Console(stderr=True)
    if arguments.merge:
        report = read_report(arguments.merge[0])
        for path in arguments.merge[1:]:
            report.merge(read_report(path))
        if arguments.json:
            report.write(arguments.json)
    else:
        report = _measure(arguments, notes)
    _show(report)
    return 0


def _measure(arguments: argparse.Namespace, notes: Console) -> Report:
    if arguments.books is None:
        raise OptionError("--books DIR is needed: a folder that holds heldout/ with books as *.txt.xz")
    if arguments.resume and arguments.json is None:
        raise OptionError("--resume needs --json FILE, the report to go on with")
    model = Path(find_model(arguments.model))
    suite = load_suite(model, arguments.books, arguments.seed)
    first, step = arguments.shard
    indexes = range(first, arguments.documents, step)
    with (
        _worker(arguments, model, notes) as target,
        WorkerClient(target, arguments.timeout, arguments.measure) as worker,
    ):
        info = worker.info()
        policies = name_policies(arguments.policies, info.policies)
        cells = plan_cells(
            arguments.tasks, arguments.lengths, arguments.protocols, policies, arguments.budgets
        )
        _check(info, cells)
        report = _open_report(arguments, _source(arguments, model, info))

        def save() -> None:
            if arguments.json:
                report.write(arguments.json)

        concurrency = arguments.concurrency or max(1, info.max_num_seqs)
        with RunProgress(notes, report, len(cells), len(indexes)) as progress:
            Runner(suite, worker, report, save, progress, concurrency).run(cells, indexes)
    return report


def _worker(arguments: argparse.Namespace, model: Path, notes: Console) -> AbstractContextManager[str]:
    if arguments.worker:
        return nullcontext(arguments.worker)
    options = LocalOptions(
        model=str(model),
        device=arguments.device,
        hot_cache=arguments.hot_cache,
        max_model_len=max(arguments.lengths),
        store_runtime=arguments.store_runtime,
        arena_bytes=arguments.arena_bytes,
        dtype=arguments.dtype,
        max_num_seqs=arguments.max_num_seqs,
        threads=arguments.threads,
        slot_memory=arguments.slot_memory,
    )
    return local_worker(options, lambda text: notes.print(text, highlight=False))


def _check(info: gpu_worker_pb2.GetInfoResponse, cells: list[Cell]) -> None:
    unknown = sorted({cell.policy for cell in cells} - set(info.policies))
    if unknown:
        raise EvaluationError(
            f"the worker has no policy {', '.join(unknown)}; it has {', '.join(info.policies)}, and {ALL}"
        )
    longest = max(cell.length for cell in cells)
    if longest > info.max_model_len:
        raise EvaluationError(f"--lengths {longest} is beyond the worker's {info.max_model_len} tokens")


def _source(arguments: argparse.Namespace, model: Path, info: gpu_worker_pb2.GetInfoResponse) -> Source:
    try:
        return Source(
            model_sha256=hash_files(model_files(model)),
            books_sha256=hash_files(book_paths(arguments.books, "eval")),
            seed=arguments.seed,
            device=info.device,
            dtype=info.dtype,
            hot_cache=REMOTE_HOT_CACHE if arguments.worker else arguments.hot_cache,
            is_measured=arguments.measure,
        )
    except (OSError, CorpusError) as exc:
        raise EvaluationError(f"cannot hash the model and the books: {exc}") from exc


def _open_report(arguments: argparse.Namespace, source: Source) -> Report:
    if arguments.resume and arguments.json.is_file():
        report = read_report(arguments.json)
        require_same_source(source, report.source)
        return report
    about = describe(source.device)
    about |= {"model": str(arguments.model or "carrel-nano"), "answer_tokens": ANSWER_TOKENS}
    return Report(source, about)


def _show(report: Report) -> None:
    results = report.results()
    console = Console()
    # elsewhere it would be squeezed into 80 columns, and Markdown says the same
    if console.is_terminal:
        console.print(rich_table(results))
    print(markdown_table(results), end="\n\n")
    for verdict in verdicts(results):
        print(verdict)


def _least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is below {least}")
        return number

    return integer


def _budget(text: str) -> float:
    budget = float(text)
    if is_tokens(budget) and budget.is_integer():
        return int(budget)
    if not 0 < budget <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share in (0, 1] and no number of tokens from 2 up")
    return budget


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard I/N with I below N, such as 0/4")
    return int(index), int(count)
