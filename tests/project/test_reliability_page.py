"""The page of attacks names tests that are there, or says what is missing."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.*?) \| (.*?) ?\|$", re.MULTILINE)
NAME = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_all_are_there_and_so_are_their_tests() -> None:
    rows = ROW.findall((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) > 40
    for number, _, tests, missing in rows:
        named = NAME.findall(tests)
        assert named or missing, number
        assert re.sub(r"[`, ]", "", NAME.sub("", tests)) == "", number
        for file, test in named:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"def {test}\(", text), f"{number}: {file}::{test}"
