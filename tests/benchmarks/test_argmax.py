"""The share of tokens that bfloat16 chooses as float32 does, of transformers and of Carrel after the same texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.argmax import main

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("transformers")


def test_both_are_held_against_float32_at_the_same_places(tmp_path: Path) -> None:
    argv = ["--model", ROOT / "models" / "carrel-nano", "--text-dir", ROOT / "examples" / "documents"]
    argv += [
        "--device",
        "cpu",
        "--prompts",
        4,
        "--short",
        8,
        12,
        "--long",
        20,
        30,
        "--forced",
        6,
        "--prefills",
        2,
    ]
    assert main([*map(str, argv), "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["argmax"]
    assert [(row["who"].split()[0], row["compared"]) for row in rows] == [
        ("transformers", 8),
        ("carrel", 8),
        ("transformers", 28),
        ("carrel", 28),
    ]
    # a place off by one, or another text, would leave little in common
    assert all(row["same"] >= 0.75 for row in rows)
