"""`carrel bench move` with two real stores in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.report import render


def test_moves_are_measured_over_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "move.json"
    sizes = ["--model-shapes", "tiny", "--contexts", "64", "--row-type", "fp32", "--repeats", "2"]
    assert main(["move", *sizes, "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    rows = content["rows"]
    assert [row["way"] for row in rows] == ["Unix socket", "TCP on loopback, with a token"]
    for row in rows:
        # A slab of 2 MiB holds 8,192 tokens of 256 bytes; there are two layers.
        assert (row["shape"], row["num_tokens"], row["num_bytes"]) == ("tiny", 8192, 2 * (2 << 20))
        assert row["ms"]["n"] == 2
        assert row["gb_per_s"] > 0
    assert content["shapes"]["tiny"]["num_layers"] == 2
    assert capsys.readouterr().out.strip() in render(path)
