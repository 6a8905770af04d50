"""Cells, questions, tables, and the processes of a run of one's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from answering_worker import LENGTH, MODEL

from carrel.cli import main
from carrel.errors import ChildError, EvaluationError
from carrel.evaluation.cells import Cell, Order, budget_name, name_policies, plan_cells
from carrel.evaluation.local import local_worker
from carrel.evaluation.record import Outcome, read_report, summarize
from carrel.evaluation.suite import ANSWER_TOKENS, Library, Suite
from carrel.evaluation.table import markdown_table, verdicts

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
OUTCOME = Outcome(0, "number", True, "1", 900, 4, 90, 88.0, 2.0, 0.5, 64, 900, 0.5, 0.25, 1.0, 2.0, 12.0)


def test_cells() -> None:
    cells = plan_cells(["mixed"], [4096], ["P1", "P2"], ["full", "oracle"], [0.2, 0.1, 0.2])
    assert len(cells) == 6
    assert cells[0] == Cell("mixed", 4096, "P1", "full", None)
    assert [cell.name for cell in cells[:3]] == [
        "mixed 4K P1 full",
        "mixed 4K P1 oracle n/5",
        "mixed 4K P1 oracle n/10",
    ]
    assert [budget_name(share) for share in (0.05, 0.3, 1.0)] == ["n/20", "0.3 n", "n/1"]
    assert [budget_name(tokens) for tokens in (2, 512, 1048576.0)] == ["2", "512", "1048576"]


def test_all_policies_are_those_that_wrap_none() -> None:
    known = ["auto", "full", "h2o", "h2o+adakv", "quest"]
    assert name_policies(["all"], known, {}) == ["full", "h2o", "quest"]
    assert name_policies(["h2o+adakv", "all", "auto"], known, {}) == [
        "h2o+adakv",
        "full",
        "h2o",
        "quest",
        "auto",
    ]
    assert name_policies(["quest", "unknown"], known, {}) == ["quest", "unknown"]


def test_rounds_ask_every_cell_a_few_documents_the_measured_ones_first() -> None:
    cells = plan_cells(["mixed"], [4096], ["P1"], ["full", "oracle"], [0.2, 0.1])
    full, fifth, tenth = cells
    order = Order(cells, range(1, 12, 2), round_of=4, num_measured=4)
    assert [list(indexes) for indexes in order.rounds] == [[1, 3, 5, 7], [9, 11]]
    first, second = (list(order.stages(indexes)) for indexes in order.rounds)
    assert [(stage.is_measured, stage.jobs) for stage in first] == [
        (True, ((full, 1), (full, 3))),
        (False, ((full, 5), (full, 7))),
        (True, ((fifth, 1), (tenth, 1), (fifth, 3), (tenth, 3))),
        (False, ((fifth, 5), (tenth, 5), (fifth, 7), (tenth, 7))),
    ]
    assert [stage.is_measured for stage in second] == [False, False]
    every = Order(cells, range(5))
    assert [list(indexes) for indexes in every.rounds] == [[0, 1, 2, 3, 4]]
    assert all(stage.is_measured for stage in every.stages(range(5)))
    assert Order(cells, range(0)).rounds == []


def test_questions_depend_on_seed_and_index_only(suite: Suite, books: Path) -> None:
    question = suite.question("mixed", LENGTH, 3)
    assert question == Suite(MODEL, Library(books), 7).question("mixed", LENGTH, 3)
    assert question != Suite(MODEL, Library(books), 8).question("mixed", LENGTH, 3)
    num_tokens = len(question.context_ids) + len(question.question_ids)
    assert LENGTH - 64 < num_tokens + ANSWER_TOKENS <= LENGTH
    text = suite.facts.codec.decode(question.context_ids)
    assert question.answers[0] in text
    assert question.answers[0] not in suite.facts.codec.decode(question.question_ids)


def test_a_length_that_no_book_fills(suite: Suite) -> None:
    with pytest.raises(EvaluationError, match="too few"):
        suite.question("needle", 10**6, 0)


def test_means_leave_out_what_was_not_measured() -> None:
    cell = Cell("mixed", 1024, "P1", "oracle", 0.1)
    other = replace(OUTCOME, index=1, is_correct=False, attention_mass=None, recall_rate=0.75, decode_ms=4.0)
    result = summarize(cell, [OUTCOME, other])
    assert (result.n, result.exact_match, result.attention_mass, result.recall_rate) == (2, 0.5, 0.5, 0.5)
    assert result.decode_ms_per_token == 2.0


def test_targets_compare_at_a_fifth_under_p1() -> None:
    results = [
        summarize(Cell("mixed", 4096, protocol, policy, budget), [replace(OUTCOME, is_correct=right)])
        for protocol, policy, budget, right in [
            ("P1", "full", None, True),
            ("P1", "oracle", 0.2, True),
            ("P1", "oracle", 0.1, False),
            ("P2", "oracle", 0.2, False),
            ("P1", "pqcache", 0.2, False),
        ]
    ]
    assert [(verdict.target.policy, verdict.loss, verdict.is_met) for verdict in verdicts(results)] == [
        ("oracle", 0.0, True),
        ("pqcache", 1.0, False),
    ]


def test_a_report_from_before_memory_was_kept_is_read_and_merged() -> None:
    report = read_report(RESULTS / "quality_h200.json")
    assert report.source.is_measured
    before = report.results()
    report.merge(read_report(RESULTS / "quality_h200.json"))
    assert report.results() == before
    assert {result.device_bytes for result in before} == {None}
    first = markdown_table(before).splitlines()[3]
    assert first.endswith("| - | 0.987 | 1.000 | - | 807 | 1.000 | - | - | 0.0 | - | - |")


def test_times_are_medians_of_unmeasured_steps() -> None:
    cell = Cell("mixed", 1024, "P1", "oracle", 0.1)
    outcomes = [
        replace(OUTCOME, index=index, prefill_ms=prefill, decode_ms=decode, decode_steps=steps)
        for index, (prefill, decode, steps) in enumerate([(900.0, 500.0, 5), (20.0, 12.0, 4), (30.0, 8.0, 4)])
    ]
    result = summarize(cell, outcomes, is_measured=False)
    assert (result.median_prefill_ms, result.median_step_ms) == (30.0, 3.0)
    measured = summarize(cell, outcomes)
    assert (measured.median_prefill_ms, measured.median_step_ms) == (None, None)
    # an answer of one token has no step
    one = summarize(cell, [replace(OUTCOME, decode_steps=0)], is_measured=False)
    assert (one.median_prefill_ms, one.median_step_ms) == (1.0, None)


def test_a_broken_report_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"format": 1}')
    with pytest.raises(EvaluationError, match="no evaluation report"):
        read_report(path)


@pytest.mark.e2e
def test_a_process_that_cannot_start_is_explained(tmp_path: Path) -> None:
    texts = {"device": "cpu", "runtime": "process", "arena_bytes": "256MiB"}
    with (
        pytest.raises(ChildError, match="worker ended with code 2") as caught,
        local_worker(str(tmp_path), texts, lambda text: None),
    ):
        pytest.fail("nothing may come up")
    assert "config.json" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.e2e
def test_a_run_with_a_store_and_a_worker_of_its_own(books: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    arguments = ["--model", MODEL, "--books", books, "--lengths", 640, "--documents", 1, "--json", path]
    arguments += ["--device", "cpu", "--threads", 1, "--arena-bytes", "256MiB", "--budgets", 0.2]
    # under Ray the store starts as it does for `carrel serve`
    arguments += ["--store-runtime", "process"]
    assert main(["eval", *map(str, arguments)]) == 0
    results = read_report(path).results()
    assert len(results) == 8
    for result in results:
        assert result.n == 1
        if result.cell.policy != "full":
            assert result.attended_tokens <= result.budget_tokens
            assert result.attention_mass is not None
            assert 0 < result.attention_mass <= 1
