"""The tables between markers come from the options, the registry and the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import RESULTS, TABLES, PageError, fill, main, pages

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


def test_results_are_printed_by_their_kind(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("prefill_1m_h200", "fidelity_smollm2_10_h200", "quality_4k_cpu")
    assert main([str(RESULTS / f"{name}.json") for name in names]) == 0
    shown = capsys.readouterr().out
    assert [shown.count(f"### {name}\n") for name in names] == [1, 1, 1]
    assert main([str(RESULTS / "vllm_mixed_h200.json")]) == 2
    assert "is not a result of" in capsys.readouterr().err


def provenance(path: Path) -> tuple[Any, Any]:
    """The command and commit that a result holds."""
    if path.suffix == ".jsonl":
        found = [json.loads(line) for line in path.read_text().splitlines()]
        content = {name: value for each in found for name, value in each.items()}
    else:
        content = json.loads(path.read_text())
    about = content.get("about", content)
    return about.get("command"), about.get("commit") or about.get("versions", {}).get("commit")


def test_every_result_tells_its_command_and_commit_or_the_page_does() -> None:
    page = (RESULTS.parents[1] / "docs" / "benchmarks.md").read_text()
    _, _, told = page.partition("## Finished studies")
    silent = [path.name for path in sorted(RESULTS.iterdir()) if not all(provenance(path))]
    assert [name for name in silent if f"`{name}`" not in told] == []
