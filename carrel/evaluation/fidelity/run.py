"""`carrel eval --fidelity`: from options to a report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from carrel.evaluation.about import describe, hash_files, model_files
from carrel.evaluation.cells import UNBUDGETED
from carrel.evaluation.fidelity.passages import Passages
from carrel.evaluation.fidelity.process import Job, measure
from carrel.evaluation.fidelity.report import WORKER_OPTIONS, FidelityReport
from carrel.evaluation.suite import Library, Suite
from carrel.process.options import OptionError

# Requests of a passage at once: one that is forced, and one that generates.
PER_PASSAGE = 2
GPU_SEQS, CPU_SEQS = 32, 8
# Passages of a length of which attention outputs are compared, unless told: it slows every step.
NUM_MEASURED = 2


def run_fidelity(arguments: argparse.Namespace, texts: Mapping[str, str], notes: Console) -> FidelityReport:
    """texts: options of the store and the worker that were given. Raises CarrelError and OptionError."""
    begun = time.monotonic()
    if arguments.worker or arguments.resume:
        raise OptionError("--fidelity starts an engine of its own, at once: leave --worker and --resume out")
    model = Path(texts["model"])
    library = Library(arguments.books, arguments.text_dir)
    passages = Passages(Suite(model, library, arguments.seed).tokenizer, library.files(), arguments.seed)
    first, step = arguments.shard
    keys = [
        (length, index)
        for index in range(first, arguments.documents, step)
        for length in dict.fromkeys(arguments.lengths)
    ]
    budgets = dict.fromkeys(arguments.budgets)
    seats = int(texts.get("max_num_seqs", CPU_SEQS if texts["device"] == "cpu" else GPU_SEQS))
    job = Job(
        {key: passages.passage(*key) for key in keys},
        [(policy, budget) for policy in arguments.policies if policy != UNBUDGETED for budget in budgets],
        arguments.forced,
        arguments.generate,
        max(1, seats // PER_PASSAGE),
        None if arguments.limit_seconds is None else arguments.limit_seconds - (time.monotonic() - begun),
        (arguments.measure_documents or NUM_MEASURED) if arguments.measure else 0,
    )
    own = {
        **{field: text for field, text in texts.items() if field != "model"},
        "max_num_seqs": str(seats),
        # the engine generates a token after the last one that is forced
        "max_model_len": str(max(arguments.lengths) + max(1, arguments.generate)),
    }
    found = measure(texts["model"], own, job, notes)
    about = describe("cpu" if texts["device"] == "cpu" else "cuda")
    about |= {
        "model": model.name,
        "model_sha256": hash_files(model_files(model)),
        "books_sha256": hash_files(library.files()),
        "seed": arguments.seed,
        "num_forced": arguments.forced,
        "num_generated": arguments.generate,
        **{name: given for name in WORKER_OPTIONS if (given := getattr(arguments, name)) is not None},
    }
    return FidelityReport(about, tuple(found))
