"""The order of work within a run."""

from __future__ import annotations

from conftest import LENGTH

from carrel.errors import EvaluationError
from carrel.evaluation.cells import Cell, plan_cells
from carrel.evaluation.documents import Codec
from carrel.evaluation.order import Order
from carrel.evaluation.record import Report, Source
from carrel.evaluation.runner import Runner
from carrel.evaluation.suite import Question, Suite
from carrel.evaluation.worker_client import Generation
from gpu_worker.v1 import gpu_worker_pb2


class Log:
    """Questions and worker in one, which note what they are asked for; the answers are empty."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self.told: list[str] = []

    @property
    def codec(self) -> Codec:
        return self._suite.codec

    def question(self, task: str, length: int, index: int) -> Question:
        self.told.append(f"draw {index}")
        return self._suite.question(task, length, index)

    def generate(self, cell: Cell, question: Question, is_measured: bool) -> Generation:
        self.told.append(f"{cell.policy} {question.index}")
        return Generation((), gpu_worker_pb2.Usage())


class Silent:
    def cell(self, cell: Cell, done: int, total: int) -> None: ...
    def finished(self, cell: Cell) -> None: ...
    def left_out(self, cell: Cell, reason: EvaluationError) -> None: ...
    def round(self, number: int, total: int) -> None: ...


def test_one_at_a_time_no_question_waits_for_its_document(suite: Suite) -> None:
    """Times would hold the pause before them: a GPU slows down while nothing runs."""
    log = Log(suite)
    report = Report(Source("", "", 7, "cpu", "float32", "auto", is_measured=False), {})
    cells = plan_cells(["mixed"], [LENGTH], ["P1"], ["full", "quest"], [0.2])
    Runner(log, log, report, lambda: None, Silent(), concurrency=1).run(Order(cells, range(4)))
    drawn, asked = [f"draw {index}" for index in range(4)], range(4)
    assert log.told == [*drawn, *(f"{name} {index}" for name in ("full", "quest") for index in asked)]
