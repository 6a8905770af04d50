"""Runs cells: the same questions to the worker, several at once, each answer scored as it comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import fields
from typing import Any

from carrel.errors import EvaluationError
from carrel.evaluation.cells import Cell, Order, Stage
from carrel.evaluation.progress import CellProgress
from carrel.evaluation.questions import Question
from carrel.evaluation.record import Outcome, Report
from carrel.evaluation.suite import Suite
from carrel.evaluation.worker_client import AnswerFailed, BudgetRefused, WorkerClient
from gpu_worker.v1.gpu_worker_pb2 import Usage

# what a run that is killed without a warning loses at most
SAVE_INTERVAL_S = 10.0
# the main thread looks up this often, so that Ctrl-C is heard
POLL_S = 0.5


class Runner:
    """Fills `report`. `save` is called every few seconds, and when the run ends, however it does."""

    def __init__(
        self,
        suite: Suite,
        worker: WorkerClient,
        report: Report,
        save: Callable[[], None],
        progress: CellProgress,
        concurrency: int,
        ends: float | None = None,
    ) -> None:
        """ends: on the monotonic clock, when nothing more is asked; None: everything is."""
        self._suite = suite
        self._worker = worker
        self._report = report
        self._save = save
        self._progress = progress
        self._concurrency = concurrency
        self._ends = ends
        self._stop = threading.Event()
        self._questions: dict[tuple[str, int, int], Question] = {}
        self._left_out: set[Cell] = set()
        self._failed: list[Cell] = []
        self._saved_at = time.monotonic()

    def run(self, order: Order) -> None:
        """Ask every question that has no outcome yet.

        A cell whose budget the policy refuses is left out, and so is one with a failed answer.
        Raises EvaluationError if there was any of the latter, or the worker is gone; what is done is saved.
        """
        pool = ThreadPoolExecutor(self._concurrency)
        self._report.expect(order.cells)
        try:
            for cell in order.cells:
                self._progress.cell(cell, self._num_done(cell, order))
            for number, indexes in enumerate(order.rounds, 1):
                for stage in order.stages(indexes):
                    if self._run_stage(stage, order, pool):
                        self._progress.tell("out of time: what was not asked stays out")
                        return
                self._progress.round(number, len(order.rounds))
        finally:
            # not waited for: the owner of the worker's connection ends the calls that still run
            self._stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            self._save()
        if self._failed:
            names = ", ".join(cell.name for cell in self._failed)
            raise EvaluationError(f"answers failed in {names}; --resume asks them again")

    def _run_stage(self, stage: Stage, order: Order, pool: ThreadPoolExecutor) -> bool:
        """Returns when every question of the stage has an answer, or its cell is left out; True if time ended first."""
        queue = iter([(cell, index) for cell, index in stage.jobs if index not in self._report.done(cell)])
        pending: dict[Future[Outcome], Cell] = {}
        while True:
            # a few ahead only: a document takes memory, and drawing one takes time
            while (
                not self._is_late
                and len(pending) < 2 * self._concurrency
                and (job := next(queue, None)) is not None
            ):
                cell, index = job
                if cell not in self._left_out:
                    question = self._question(cell, index)
                    pending[pool.submit(self._ask, cell, question, stage.is_measured)] = cell
            if not pending:
                return next(queue, None) is not None
            done = wait(pending, POLL_S, FIRST_COMPLETED).done
            # Answers first: what failed may end the run.
            for future in sorted(done, key=lambda each: each.exception() is not None):
                self._take(pending.pop(future), future, order)
            if time.monotonic() - self._saved_at > SAVE_INTERVAL_S:
                self._save()
                self._saved_at = time.monotonic()

    @property
    def _is_late(self) -> bool:
        return self._ends is not None and time.monotonic() > self._ends

    def _take(self, cell: Cell, future: Future[Outcome], order: Order) -> None:
        try:
            self._report.add(cell, future.result())
        except (BudgetRefused, AnswerFailed) as reason:
            if cell not in self._left_out:
                self._left_out.add(cell)
                self._failed += [cell] if isinstance(reason, AnswerFailed) else []
                self._progress.left_out(cell, reason)
            return
        num_done = self._num_done(cell, order)
        self._progress.cell(cell, num_done)
        if num_done == len(order.indexes):
            self._progress.finished(cell)

    def _num_done(self, cell: Cell, order: Order) -> int:
        return len(self._report.done(cell).intersection(order.indexes))

    def _question(self, cell: Cell, index: int) -> Question:
        key = (cell.task, cell.length, index)
        if key not in self._questions:
            if self._questions and next(iter(self._questions))[:2] != key[:2]:
                self._questions.clear()
            self._questions[key] = self._suite.question(*key)
        return self._questions[key]

    def _ask(self, cell: Cell, question: Question, is_measured: bool) -> Outcome:
        if self._stop.is_set():
            raise InterruptedError("the run is over")
        generation = self._worker.generate(cell, question, is_measured)
        prediction = self._suite.decode(generation.token_ids)
        return outcome(cell, question, prediction, generation.usage, is_measured)


def outcome(cell: Cell, question: Question, prediction: str, usage: Usage, is_measured: bool) -> Outcome:
    """Score one answer and keep its cost."""
    # The step that reads the last prompt token gives the first of the answer; under P1 that is the prefill's.
    num_decoded = len(question.question_ids) if cell.protocol == "P2" else 0
    return Outcome(
        index=question.index,
        kind=question.kind,
        is_correct=question.is_right(prediction),
        score=question.score(prediction),
        prediction=prediction,
        decode_steps=num_decoded + max(0, usage.completion_tokens - 1),
        is_measured=is_measured,
        **_costs(usage),
    )


def _costs(usage: Usage) -> dict[str, Any]:
    """The message's fields that an outcome has by the same names; None for what was not measured."""
    names = {field.name for field in fields(Outcome)}
    return {
        field.name: None
        if field.has_presence and not usage.HasField(field.name)
        else getattr(usage, field.name)
        for field in usage.DESCRIPTOR.fields
        if field.name in names
    }
