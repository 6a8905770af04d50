"""`carrel eval --fidelity`: from options to a report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from rich.console import Console

from carrel.errors import EvaluationError
from carrel.evaluation.about import describe, hash_files, model_files
from carrel.evaluation.cells import UNBUDGETED
from carrel.evaluation.fidelity.process import Job, measure
from carrel.evaluation.fidelity.report import WORKER_OPTIONS, FidelityReport
from carrel.evaluation.suite import Library, Suite
from carrel.process.options import OptionError
from carrel.texts import read_text

if TYPE_CHECKING:
    from gateway.tokenizer import Tokenizer

# Characters that are tokenized for a passage, times its tokens: no tokenizer of words has more to a token on average.
CHARS_PER_TOKEN = 6


class Passages:
    """Passage `index` of a length: from the book that is next in turn, at a place that the seed decides."""

    def __init__(self, tokenizer: Tokenizer, files: Sequence[Path], seed: int) -> None:
        """Raises EvaluationError where there is nothing to read."""
        if not files:
            raise EvaluationError("--fidelity needs texts: name a folder with --text-dir or --books")
        self._tokenizer = tokenizer
        self._texts = [read_text(path) for path in files]
        self._seed = seed

    def passage(self, length: int, index: int) -> tuple[int, ...]:
        """`length` token ids, the model's begin token first where it has one. Raises EvaluationError."""
        text, num_chars = self._texts[index % len(self._texts)], CHARS_PER_TOKEN * length
        last = len(text) - num_chars
        place = Random(f"{self._seed}:{length}:{index}").randrange(max(1, last))
        # from a paragraph's beginning on, where there is one
        paragraph = text.find("\n\n", place, place + num_chars // 4)
        place = place if paragraph < 0 else paragraph + 2
        found = self._tokenizer.encode(text[place : place + num_chars], add_special_tokens=True)[:length]
        if len(found) < length:
            raise EvaluationError(f"a text of {len(text)} characters has no passage of {length} tokens")
        return found


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
