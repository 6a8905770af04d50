"""`carrel eval`: the quality table. Every policy and budget answers the same questions as dense attention."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import reduce
from pathlib import Path

from rich.console import Console

from carrel import tables
from carrel.errors import EvaluationError
from carrel.evaluation.about import describe, hash_files, model_files
from carrel.evaluation.arguments import OWN, add_arguments
from carrel.evaluation.cells import ABLATIONS, ALL, Cell, Order, name_policies, plan_cells
from carrel.evaluation.fidelity.report import COLUMNS, FidelityReport, read_fidelity
from carrel.evaluation.fidelity.run import run_fidelity
from carrel.evaluation.local import local_worker
from carrel.evaluation.progress import CellProgress
from carrel.evaluation.record import Report, Source, read_report, require_same_source
from carrel.evaluation.runner import Runner
from carrel.evaluation.suite import Library, Suite
from carrel.evaluation.table import columns, verdicts
from carrel.evaluation.tasks import expand
from carrel.evaluation.worker_client import WorkerClient
from carrel.methods import ablations_of, read_methods
from carrel.process.options import OptionError
from carrel.process.policy_names import choices
from carrel.serve.model import find_model
from carrel.serve.signals import sigterm_as_interrupt
from gpu_worker.v1 import gpu_worker_pb2

__all__ = ["add_arguments", "run"]

REMOTE_HOT_CACHE = "the worker's own"


def run(arguments: argparse.Namespace) -> int:
    """Tables go to stdout, progress to stderr. Returns 0 whatever the quality; raises CarrelError."""
    notes = Console(stderr=True)
    if arguments.policy_options is not None:
        arguments.policy_options = ",".join(arguments.policy_options)
    if arguments.fidelity:
        _fidelity(arguments, notes)
        return 0
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


def _fidelity(arguments: argparse.Namespace, notes: Console) -> None:
    if arguments.merge:
        report = reduce(FidelityReport.merged, map(read_fidelity, arguments.merge))
    else:
        texts = _given(arguments) | {"model": find_model(arguments.model)}
        report = run_fidelity(arguments, texts, notes)
    if arguments.json:
        report.write(arguments.json)
    tables.show("Distance to full attention", COLUMNS, report.rows())


def _measure(arguments: argparse.Namespace, notes: Console) -> Report:
    if arguments.resume and arguments.json is None:
        raise OptionError("--resume needs --json FILE, the report to go on with")
    model = Path(find_model(arguments.model))
    first, step = arguments.shard
    begun = time.monotonic()
    library = Library(arguments.books, arguments.text_dir)
    suite = Suite(model, library, arguments.seed, arguments.chat)
    tasks = expand(arguments.tasks)
    # what cannot be asked is told before anything is started
    for task in tasks:
        suite.question(task, min(arguments.lengths), first)
    indexes = range(first, arguments.documents, step)
    with (
        _worker(arguments, model, notes) as target,
        closing(WorkerClient(target, arguments.timeout)) as worker,
    ):
        info = worker.info()
        ablations = ablations_of(read_methods()) if ABLATIONS in arguments.policies else {}
        policies = name_policies(arguments.policies, info.policies, ablations)
        cells = plan_cells(tasks, arguments.lengths, arguments.protocols, policies, arguments.budgets)
        if arguments.model is None and (served := Path(info.model).name) != model.name:
            raise EvaluationError(
                f"the worker serves {served}; name it by --model: questions are asked in tokens of {model.name}"
            )
        _check(info, cells)
        report = _open_report(arguments, _source(arguments, model, library.files(), info))

        def save() -> None:
            if arguments.json:
                report.write(arguments.json)

        concurrency = arguments.concurrency or max(1, info.max_num_seqs)
        with CellProgress(notes, report, len(cells), len(indexes)) as progress:
            num_measured = arguments.measure_documents if arguments.measure else 0
            order = Order(cells, indexes, arguments.rounds_of, num_measured)
            ends = None if arguments.limit_seconds is None else begun + arguments.limit_seconds
            Runner(suite, worker, report, save, progress, concurrency, ends).run(order)
    return report


@contextmanager
def _worker(arguments: argparse.Namespace, model: Path, notes: Console) -> Iterator[str]:
    if arguments.worker:
        with sigterm_as_interrupt():
            yield arguments.worker
        return
    texts = _given(arguments)
    texts["max_model_len"] = str(max(arguments.lengths))
    # The time of a prefill that begins with another policy's rows would be compared with that of a whole one.
    texts.setdefault("prefix_cache", "on" if arguments.measure else "off")
    texts["no_warmup"] = "true"
    with local_worker(str(model), texts, lambda text: notes.print(text, highlight=False)) as address:
        yield address


def _given(arguments: argparse.Namespace) -> dict[str, str]:
    """Options of the worker and the store, by field."""
    given = {field: getattr(arguments, field) for field in (*OWN, "runtime")}
    return {field: text for field, text in given.items() if text is not None}


def _check(info: gpu_worker_pb2.GetInfoResponse, cells: list[Cell]) -> None:
    unknown = sorted({cell.policy for cell in cells} - set(info.policies))
    if unknown:
        raise EvaluationError(
            f"the worker has no policy {', '.join(unknown)}; {choices(unknown[0], (ALL, ABLATIONS, *info.policies))}"
        )
    longest = max(cell.length for cell in cells)
    if longest > info.max_model_len:
        raise EvaluationError(f"--lengths {longest} is beyond the worker's {info.max_model_len} tokens")


def _source(
    arguments: argparse.Namespace, model: Path, files: list[Path], info: gpu_worker_pb2.GetInfoResponse
) -> Source:
    try:
        return Source(
            model_sha256=hash_files(model_files(model)),
            books_sha256=hash_files(files) if files else "",
            seed=arguments.seed,
            device=info.device,
            dtype=info.dtype,
            hot_cache=REMOTE_HOT_CACHE if arguments.worker else arguments.hot_cache,
            is_measured=arguments.measure,
            index_device=arguments.index_device,
            calibration_sha256=hash_files([Path(arguments.calibration)]) if arguments.calibration else None,
            is_chat=arguments.chat,
            policy_options=arguments.policy_options,
            full_layers=arguments.full_layers,
            granularity=arguments.granularity,
        )
    except OSError as exc:
        raise EvaluationError(f"cannot hash the model, the books and the calibration: {exc}") from exc


def _open_report(arguments: argparse.Namespace, source: Source) -> Report:
    about = describe(source.device)
    about["model"] = Path(arguments.model).name if arguments.model else "carrel-nano"
    report = Report(source, about)
    if not (arguments.resume and arguments.json.is_file()):
        return report
    earlier = read_report(arguments.json)
    require_same_source(source, earlier.source)
    # Nothing but the commit: the documents to come are of this one.
    earlier.merge(report)
    return earlier


def _show(report: Report) -> None:
    results = report.results()
    title = "Exact match of the whole answer (95 % Wilson interval)"
    tables.show(title, columns(results), results, map(str, verdicts(results)))
