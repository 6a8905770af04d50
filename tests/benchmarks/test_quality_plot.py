"""Pictures of quality against memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import plots, quality_plot
from benchmarks.report import RESULTS, main
from carrel.evaluation.cells import Cell
from carrel.evaluation.record import Outcome, Report, Source

pytest.importorskip("matplotlib")

SOURCE = Source("model", "books", 1, "cpu", "float32", "0.25")


def outcome(device_bytes: int, index: int = 0) -> Outcome:
    return Outcome(
        index, "number", True, "1", 900, 4, 90, 88, 2, 1, 0, 0, None, None, 1, 2, 3, 3, device_bytes, 0
    )


def test_places_are_kept_apart_and_moved_no_further_than_that_takes() -> None:
    assert plots.spread([1.0, 2.0, 4.0], 1.0) == [1.0, 2.0, 4.0]
    assert plots.spread([3.0, 3.0, 3.0], 1.0) == [2.0, 3.0, 4.0]
    assert plots.spread([], 1.0) == []
    crowded = plots.spread([0.0, 0.0, 0.1, 0.2, 5.0, 5.0], 0.5)
    assert all(right - left >= 0.5 - 1e-9 for left, right in pairwise(crowded))
    assert sum(crowded) == pytest.approx(10.3)


def test_a_picture_for_each_task_length_and_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(SOURCE, {})
    for protocol in ("P1", "P2"):
        report.add(Cell("mixed", 4096, protocol, "full", None), outcome(64 * 2**20))
        for budget in (0.2, 512):
            report.add(Cell("mixed", 4096, protocol, "snapkv+made_up", budget), outcome(8 * 2**20))
            report.add(Cell("mixed", 4096, protocol, "made_up", budget), outcome(8 * 2**20))
    drawn: dict[str, dict[str, list[plots.Spot]]] = {}
    draw = plots.panels

    def panels(path: Path, x_label: str, y_label: str, spots: dict[str, list[plots.Spot]]) -> None:
        drawn[path.name] = spots
        draw(path, x_label, y_label, spots)

    monkeypatch.setattr(plots, "panels", panels)
    quality_plot.draw(report.results(), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "quality_mixed_4K_P1.png",
        "quality_mixed_4K_P2.png",
    ]
    of_p1 = drawn["quality_mixed_4K_P1.png"]
    assert list(of_p1) == ["budget n/5", "budget 512"]
    for spots in of_p1.values():
        assert [(spot.series, spot.family, spot.x) for spot in spots] == [
            ("full", "dense", 64.0),
            ("snapkv+made_up", "retain", 8.0),
            ("made_up", "unknown", 8.0),
        ]
        assert all(spot.low < spot.y == 1.0 for spot in spots)


def test_a_report_draws_nothing_where_memory_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(RESULTS / "quality_4k_cpu.json"), "--plots", str(tmp_path)]) == 0
    assert "| mixed | 4K | P1 | oracle | n/5 | 100 |" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_cell_where_every_answer_is_right_is_drawn(tmp_path: Path) -> None:
    # The interval's upper bound is 1 less a rounding error then.
    report = Report(SOURCE, {})
    for index in range(10):
        report.add(Cell("mixed", 4096, "P1", "made_up", 0.2), outcome(8 * 2**20, index))
    assert report.results()[0].high < report.results()[0].exact_match
    quality_plot.draw(report.results(), tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_every_committed_result_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("### ")]
    assert shown == [f"### {path.stem}" for path in sorted(RESULTS.glob("*.json"))]
