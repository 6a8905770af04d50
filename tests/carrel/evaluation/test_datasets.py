"""Benchmarks in files of the user's own: formats by small items of ours, metrics by values worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import EvaluationError
from carrel.evaluation.datasets import DATASETS, metrics
from carrel.evaluation.suite import Library, Suite

MODEL = Path(__file__).parents[3] / "models" / "carrel-nano"


@pytest.mark.parametrize(
    ("metric", "prediction", "answers", "expected"),
    [
        # "red", "fox" of "red", "fox", "ran" and "red", "old", "fox": 2 * 2 / (3 + 3)
        (metrics.best_of(metrics.word_f1), "The red fox ran.", ("an old red fox", "nothing"), 4 / 6),
        (metrics.best_of(metrics.word_f1), "the", ("a",), 0.0),
        # "a c d" is in both, in this order: 2 * 3 / (4 + 5)
        (metrics.best_of(metrics.rouge_l), "a b c d", ("a c x d b",), 6 / 9),
        # "x = (" of 8 and 7 characters: 2 * 5 / 15, in whole per cents
        (metrics.best_of(metrics.edit_similarity), "# no\nx = f(1)\ny", ("x = g(2",), 0.67),
        (metrics.best_of(metrics.id_share), "12, or 12 or 3", ("Paragraph 12",), 2 / 3),
        (metrics.best_of(metrics.id_share), "none", ("Paragraph 12",), 0.0),
        (metrics.classes_named(("City", "City name", "Date")), "City name or Date", ("Date",), 1 / 3),
        (metrics.classes_named(("City", "City name")), "City name", ("City name",), 1.0),
        (metrics.first_line(metrics.any_contained), "\n\nParis\nRome", ("rome",), 0.0),
        (metrics.any_contained, "It was Rome.", ("paris", "rome"), 1.0),
        (metrics.word_said, 'is "ab-12".', ("ab-12",), 1.0),
        (metrics.word_said, "is xab-12", ("ab-12",), 0.0),
        (metrics.last_number, "3 + 4 makes 1,007.0", ("1007",), 1.0),
        (metrics.last_number, "7, not 3", ("7",), 0.0),
        (metrics.option_named, "I say B, not C", ("B",), 1.0),
    ],
)
def test_metrics(metric: Any, prediction: str, answers: tuple[str, ...], expected: float) -> None:
    assert metric(prediction, answers) == pytest.approx(expected)


RECORDS: dict[str, tuple[str, dict[str, Any], str, float]] = {
    "longbench/qasper": (
        "qasper.jsonl",
        {"input": "Who?", "context": "Long ago.", "answers": ["the king", "no one"]},
        "King",
        1.0,
    ),
    "longbench/trec": (
        "trec.jsonl",
        {
            "input": "Question: Who?\nType:",
            "context": "",
            "answers": ["Person"],
            "all_classes": ["Person", "Date"],
        },
        " Person\nDate",
        1.0,
    ),
    "infinitebench/longbook_choice_eng": (
        "longbook_choice_eng.jsonl",
        {"input": "Who?", "context": "Long ago.", "answer": ["Ann"], "options": ["Bob", "Ann", "Cid", "Dan"]},
        "B",
        1.0,
    ),
    "infinitebench/passkey": (
        "passkey.jsonl",
        {"input": "Key?", "context": "It is 7.", "answer": "7"},
        "7.",
        1.0,
    ),
    "ruler/4096/niah_multivalue": (
        "4096/niah_multivalue.jsonl",
        {"index": 0, "input": "One is 1.\nTwo is 2.\nWhich?", "outputs": ["1", "2"], "length": 20},
        "1 and 3",
        0.5,
    ),
    "gsm8k/test": ("gsm8k_test.jsonl", {"question": "3 + 4?", "answer": "It is 7.\n#### 7"}, "So 7", 1.0),
}


@pytest.mark.parametrize("task", RECORDS)
def test_a_file_is_asked_and_scored(task: str, tmp_path: Path) -> None:
    name, record, prediction, expected = RECORDS[task]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"{json.dumps(record)}\n\n")
    suite = Suite(MODEL, Library(data=tmp_path), 1)
    question = suite.question(task, 2048, 0)
    assert question.score(prediction) == pytest.approx(expected)
    told = suite.decode(question.context_ids + question.question_ids)
    assert all(str(record[key]).strip() in told for key in ("input", "question", "context") if key in record)
    with pytest.raises(EvaluationError, match="has 1 items"):
        suite.question(task, 2048, 1)


def test_a_long_context_is_cut_in_its_middle(tmp_path: Path) -> None:
    context = " ".join(str(number) for number in range(3000))
    record = {"input": "Which?", "context": context, "answers": ["1"]}
    (tmp_path / "qasper.jsonl").write_text(json.dumps(record))
    suite = Suite(MODEL, Library(data=tmp_path), 1)
    question = suite.question("longbench/qasper", 600, 0)
    assert len(question.context_ids) + len(question.question_ids) + question.max_tokens == 600
    told = suite.decode(question.context_ids)
    assert told.startswith("0 1 2 3")
    assert told.rstrip().endswith("2998 2999")
    assert "1500" not in told


def test_what_is_wrong_with_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"qasper\.jsonl: No such file"):
        DATASETS["longbench"].load(tmp_path, "qasper")
    (tmp_path / "qasper.jsonl").write_text('{"input": "Who?", "answers": ["I"]}')
    with pytest.raises(EvaluationError, match="line 1: 'context' is missing"):
        DATASETS["longbench"].load(tmp_path, "qasper")
    (tmp_path / "gsm8k_test.jsonl").write_text('{"question": "3?", "answer": "7"}')
    with pytest.raises(EvaluationError, match="line 1: an answer without ####"):
        DATASETS["gsm8k"].load(tmp_path, "test")
    with pytest.raises(EvaluationError, match="--data-dir"):
        Suite(MODEL, Library(), 1).question("gsm8k/test", 512, 0)
