"""The tables of the pages come from the committed results."""

from __future__ import annotations

import pytest

from benchmarks.pages.__main__ import main, pages
from benchmarks.pages.catalog import TABLES
from benchmarks.pages.page import PageError, fill

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
