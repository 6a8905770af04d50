"""Means and intervals of `carrel eval --fidelity`, and the whole way of a small run."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from carrel.cli import main
from carrel.errors import EvaluationError
from carrel.evaluation.fidelity.report import COLUMNS, FidelityReport, Passage, read_fidelity
from carrel.tables import markdown

FULL = Passage(1024, 0, "full", None, 100, 2.0, 0.0, 1.0, 32, 960.0, 1000, 0)
OURS = replace(
    FULL, policy="oracle", budget=0.1, nll=2.1, kl=0.05, agreement=0.9, same_tokens=20, attended=96.0
)
MEASURED = {"attention_mass": 0.9, "best_recall": 0.75, "output_errors": [[0.1, 0.3], [0.0, 0.2]]}


def test_perplexity_is_held_against_full_on_the_same_passages(tmp_path: Path) -> None:
    passages = [FULL, replace(FULL, index=1, nll=3.0), OURS, replace(OURS, index=1, nll=3.1, **MEASURED)]
    report = FidelityReport({"model": "tiny", "versions": {"commit": "abc"}}, tuple(passages))
    full, ours = report.rows()
    assert full.perplexity == pytest.approx(math.exp(2.5))
    assert ours.ratio is not None
    # Passages differ by a factor of e, the policies on each by the same tenth.
    assert (ours.ratio.value, ours.ratio.low, ours.ratio.high) == pytest.approx((math.exp(0.1),) * 3)
    assert (ours.num_measured, ours.best_recall, ours.head_errors) == (1, 0.75, MEASURED["output_errors"])
    assert ours.output_error == pytest.approx(0.15)
    path = tmp_path / "fidelity.json"
    report.write(path)
    assert read_fidelity(path) == report
    line = markdown(COLUMNS, report.rows()).splitlines()[3]
    assert line.startswith(
        "| 1K | oracle | n/10 | 2 | 13.46 | 1.1052 (1.1052-1.1052) | 0.0500 (0.0500-0.0500) | 0.900"
    )
    parts = [FidelityReport(report.about, report.passages[place::2]) for place in range(2)]
    assert parts[0].merged(parts[1]).rows() == report.rows()
    with pytest.raises(EvaluationError, match="of another run: seed"):
        report.merged(FidelityReport({"seed": 2}, ()))
    with pytest.raises(EvaluationError, match="of another run: policy_options"):
        report.merged(FidelityReport({"policy_options": "quest:page_size=8"}, ()))
    path.write_text('{"format": 1}')
    with pytest.raises(EvaluationError, match="no report of --fidelity"):
        read_fidelity(path)


@pytest.mark.e2e
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("the", "of", "and", "sea", "ship", "old", "man", "wind", "long", "night", "came")
    (tmp_path / "a.txt").write_text(" ".join(random.Random(0).choices(words, k=3000)))
    argv = [
        "eval",
        "--fidelity",
        "--text-dir",
        tmp_path,
        "--lengths",
        400,
        "--documents",
        1,
        "--policies",
        "oracle",
    ]
    argv += ["--budgets", 0.2, "--forced", 4, "--generate", 2, "--device", "cpu", "--threads", 1]
    argv += ["--arena-bytes", "256MiB", "--max-num-seqs", 2, "--json", tmp_path / "out.json"]
    assert main(list(map(str, argv))) == 0
    full, ours = read_fidelity(tmp_path / "out.json").rows()
    assert (full.n, full.kl.value, full.attended > ours.attended) == (1, 0.0, True)
    assert ours.head_errors
    assert capsys.readouterr().out.count("| 400 |") == 2
