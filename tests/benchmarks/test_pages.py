"""The tables of the pages come from the committed results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.pages import served, sources
from benchmarks.pages.__main__ import main, pages
from benchmarks.pages.catalog import TABLES
from benchmarks.pages.page import PageError, fill
from benchmarks.report import RESULTS

PAGE = "before\n<!-- table two -->\nold\n<!-- end -->\nafter\n"


def test_only_what_stands_between_markers_is_written() -> None:
    written = fill(PAGE, {"two": lambda: "new"})
    assert written == "before\n<!-- table two -->\n\nnew\n\n<!-- end -->\nafter\n"
    assert fill(written, {"two": lambda: "new"}) == written


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("<!-- table one -->\n<!-- end -->", "no table 'one'; there are two"),
        ("<!-- table two -->", "'two' is not closed"),
        ("<!-- table two --><!-- table two --><!-- end -->", "'two' is not closed"),
    ],
)
def test_a_marker_that_cannot_be_filled_is_refused(page: str, reason: str) -> None:
    with pytest.raises(PageError, match=reason):
        fill(page, {"two": lambda: "new"})


def test_the_committed_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_every_table_stands_on_a_page() -> None:
    text = "".join(page.read_text() for page in pages())
    assert [name for name in TABLES if f"<!-- table {name} -->" not in text] == []


def test_turns_are_told_by_the_medians_of_first_and_of_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (*RESULTS.glob("serve_*_h200.json"), *RESULTS.glob("vllm_mixed_h200.json")):
        shutil.copy(file, tmp_path)
    path = tmp_path / "serve_known_snapkv_h200.json"
    content = json.loads(path.read_text())
    times = {"p50": 1234.0, "p95": 8900.0, "p99": 8900.0}
    content["rows"][0] |= {"first_ttft_ms": times, "later_ttft_ms": times | {"p50": 56.0}, "num_done": 6}
    path.write_text(json.dumps(content))
    monkeypatch.setattr(sources, "RESULTS", tmp_path)
    (line,) = (line for line in served.under_load().splitlines() if "`snapkv`" in line)
    assert "| 1,234 / 56 |" in line
