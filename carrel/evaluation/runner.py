"""Runs cells: the same questions to the worker, several at once, each answer scored as it comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from carrel.evaluation.cells import Cell
from carrel.evaluation.documents import Codec
from carrel.evaluation.record import Outcome, Report
from carrel.evaluation.scoring import exact_match
from carrel.evaluation.suite import Question
from carrel.evaluation.worker_client import BudgetRefused, Generation

SAVE_INTERVAL_S = 30.0
# the main thread looks up this often, so that Ctrl-C is heard
POLL_S = 0.5


class Answerer(Protocol):
    """What the runner needs of a worker."""

    def generate(self, cell: Cell, question: Question) -> Generation: ...


class Questions(Protocol):
    """What the runner needs of a suite."""

    @property
    def codec(self) -> Codec: ...

    def question(self, task: str, length: int, index: int) -> Question: ...


class Progress(Protocol):
    """Is told how far the run is."""

    def cell(self, cell: Cell, done: int, total: int) -> None: ...

    def finished(self, cell: Cell) -> None: ...

    def refused(self, cell: Cell, reason: BudgetRefused) -> None: ...


class Runner:
    """Fills `report`. `save` is called after each cell and at least every half minute."""

    def __init__(
        self,
        suite: Questions,
        worker: Answerer,
        report: Report,
        save: Callable[[], None],
        progress: Progress,
        concurrency: int,
    ) -> None:
        self._suite = suite
        self._worker = worker
        self._report = report
        self._save = save
        self._progress = progress
        self._concurrency = concurrency
        self._stop = threading.Event()
        self._questions: dict[tuple[str, int, int], Question] = {}

    def run(self, cells: Sequence[Cell], indexes: Sequence[int]) -> None:
        """Ask every question that has no outcome yet; cells whose budget the policy refuses are passed over.

        Raises EvaluationError; what is done until then is saved.
        """
        pool = ThreadPoolExecutor(self._concurrency)
        try:
            for cell in cells:
                try:
                    self._run_cell(cell, indexes, pool)
                except BudgetRefused as reason:
                    self._progress.refused(cell, reason)
        finally:
            # not waited for: whoever owns the worker's connection ends the calls that still run
            self._stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            self._save()

    def _run_cell(self, cell: Cell, indexes: Sequence[int], pool: ThreadPoolExecutor) -> None:
        done = self._report.done(cell)
        missing = [index for index in indexes if index not in done]
        total = len(indexes)
        self._progress.cell(cell, total - len(missing), total)
        if not missing:
            return
        pending: set[Future[Outcome]] = set()
        queue, saved_at, num_left = iter(missing), time.monotonic(), len(missing)
        while num_left:
            # a few ahead only: a document takes memory, and drawing one takes time
            while len(pending) < 2 * self._concurrency and (index := next(queue, None)) is not None:
                pending.add(pool.submit(self._ask, cell, self._question(cell, index)))
            finished, pending = wait(pending, POLL_S, FIRST_COMPLETED)
            for future in finished:
                self._report.add(cell, future.result())
                num_left -= 1
                self._progress.cell(cell, total - num_left, total)
            if time.monotonic() - saved_at > SAVE_INTERVAL_S:
                self._save()
                saved_at = time.monotonic()
        self._save()
        self._progress.finished(cell)

    def _question(self, cell: Cell, index: int) -> Question:
        key = (cell.task, cell.length, index)
        if key not in self._questions:
            if self._questions and next(iter(self._questions))[:2] != key[:2]:
                self._questions.clear()
            self._questions[key] = self._suite.question(*key)
        return self._questions[key]

    def _ask(self, cell: Cell, question: Question) -> Outcome:
        if self._stop.is_set():
            raise InterruptedError("the run is over")
        generation = self._worker.generate(cell, question)
        return outcome(cell, question, generation, self._suite.codec)


def outcome(cell: Cell, question: Question, generation: Generation, codec: Codec) -> Outcome:
    """Score one answer by exact match and keep its cost."""
    usage = generation.usage
    prediction = codec.decode(generation.token_ids)
    # The step that reads the last prompt token gives the first of the answer; under P1 that is the prefill's.
    num_decoded = len(question.question_ids) if cell.protocol == "P2" else 0
    return Outcome(
        index=question.index,
        kind=question.kind,
        is_correct=exact_match(prediction, question.answer),
        prediction=prediction,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        budget_tokens=usage.budget_tokens,
        attended_tokens=usage.attended_tokens,
        window_tokens=usage.window_tokens,
        hit_rate=usage.hit_rate,
        bytes_moved=usage.bytes_moved,
        offloaded_tokens=usage.offloaded_tokens,
        attention_mass=usage.attention_mass if usage.HasField("attention_mass") else None,
        recall_rate=usage.recall_rate if usage.HasField("recall_rate") else None,
        prefill_ms=usage.prefill_ms,
        index_wait_ms=usage.index_wait_ms,
        decode_ms=usage.decode_ms,
        decode_steps=num_decoded + max(0, usage.completion_tokens - 1),
        device_bytes=usage.device_bytes,
        host_bytes=usage.host_bytes,
    )
