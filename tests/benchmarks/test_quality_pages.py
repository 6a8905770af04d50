"""docs/quality.md's tables from whatever part of the results is there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pages import claims, comparison, pick, sources
from benchmarks.pages.joined import joined
from carrel.evaluation.cells import Cell
from carrel.evaluation.record import Outcome, Report, Source

SOURCE = Source("model", "books", 1, "cuda:0", "bfloat16", "1.0", is_measured=False)


def outcome(index: int, score: float) -> Outcome:
    costs = (100, 4, 10, 10.0, 0.0, 1.0, 0, 0, None, None, 1.0, 0.0, 1.0)
    return Outcome(index, "kind", score == 1, "said", *costs, score=score)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sources, "RESULTS", tmp_path)
    joined.cache_clear()
    right = {("full", None): 20, ("bitkeys", 0.1): 20, ("bitkeys", 0.05): 18, ("quest", 0.1): 14}
    for part, indexes in (("a", range(10)), ("b", range(10, 20))):
        report = Report(SOURCE, {})
        for (policy, budget), num_right in right.items():
            for index in indexes:
                cell = Cell("niah_single_2", 4096, "P1", policy, budget)
                report.add(cell, outcome(index, float(index < num_right)))
        report.write(tmp_path / f"quality_smollm2_{part}.json")
    yield tmp_path
    joined.cache_clear()


def test_shards_are_joined_and_held_against_full(results: Path) -> None:
    lines = comparison.answers("smollm2", ("niah_single_2",))().splitlines()
    assert [line.split(" | ")[:4] for line in lines[2:]] == [
        ["| `full`", "all", "1.00", "-"],
        ["| `bitkeys`", "n/10", "1.00", "+0.000 (+0.000 to +0.000)"],
        ["| `bitkeys`", "n/20", "0.90", "-0.100 (-0.250 to +0.000)"],
        ["| `quest`", "n/10", "0.70", "-0.300 (-0.500 to -0.100)"],
    ]
    assert comparison.answers("nano", ("mixed",))() == comparison.NOTHING


def test_the_least_budget_that_is_as_good_is_named(results: Path) -> None:
    lines = pick.table().splitlines()
    assert lines[2].startswith("| `bitkeys` | n/10 (+0.000) |  |  |  |")
    assert lines[3].startswith("| `quest` | above n/10 (-0.30) |")


def test_claims_stand_by_what_their_worker_was_told_beside_every_answer_of_full(results: Path) -> None:
    options = {None: 4, "infinigen:ratio=0.4,quest:page_size=8": 10}
    for part, (told, num_right) in enumerate(options.items()):
        report = Report(replace(SOURCE, policy_options=told), {})
        for index in range(20):
            for policy, right in (("infinigen", num_right), ("snapkv", 14)):
                cell = Cell("niah_single_2", 4096, "P1", policy, 0.1)
                report.add(cell, outcome(index, float(index < right)))
        report.write(results / f"claims_smollm2_columns_{part}.json")
    lines = claims.experiments("columns")().splitlines()
    assert [line.split(" | ")[:5] for line in lines[2:]] == [
        ["| `infinigen`", "n/10", "0.20", "-0.800 (-0.950 to -0.600)", "20 |"],
        ["| `infinigen`, infinigen:ratio=0.4", "n/10", "0.50", "-0.500 (-0.700 to -0.250)", "20 |"],
        ["| `snapkv`", "n/10", "0.70", "-0.300 (-0.500 to -0.100)", "20 |"],
    ]


def test_claims_of_a_sweep_come_by_its_numbers(results: Path) -> None:
    for size in (16, 8, 128):
        report = Report(replace(SOURCE, policy_options=f"quest:page_size={size}"), {})
        report.add(Cell("niah_single_2", 4096, "P1", "quest", 0.1), outcome(0, 1.0))
        report.write(results / f"claims_smollm2_pages_{size}.json")
    told = [line.split(" | ")[0] for line in claims.experiments("pages")().splitlines()[2:]]
    assert told == [f"| `quest`, quest:page_size={size}" for size in (8, 16, 128)]
