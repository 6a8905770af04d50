"""Servers started for the loads of the page, and what is there already left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from ports import free_port

from benchmarks import under_load
from benchmarks.load.traffic import TrafficClass

NAMES = ["chats", "mixed", "batch", "mixed_default", "known_full", "known_snapkv", "known_auto"]


@pytest.mark.parametrize("shrink", [1, 64])
def test_each_load_is_traffic_that_bench_serve_takes(shrink: int) -> None:
    loads = [load for server in under_load.servers(shrink) for load in server.loads]
    assert [load.name for load in loads] == NAMES
    for load in loads:
        assert load.arguments[0] == "--traffic"
        for word in load.arguments[1:]:
            if word.startswith("--"):
                break
            assert TrafficClass.parse(word).prompt_tokens <= 100_000 // shrink


def test_a_load_that_has_its_json_is_not_run_again(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"serve_{name}_here.json").write_text("{}")
    assert under_load.main(["--out", str(tmp_path)]) == 0


def test_a_load_that_nobody_knows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        under_load.main(["--out", str(tmp_path), "--loads", "chats", "chants"])
    assert "no load is named chants; there are chats, mixed" in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model-shape", "tiny", "--arena-bytes", "1PiB", "--loads", "batch", "--out", str(tmp_path)]
    assert under_load.main(options) == 1
    assert "kv_store ended with" in (error := capsys.readouterr().err)
    assert "1PiB" in error or "1125899906842624" in error
    assert not list(tmp_path.iterdir())


def test_a_load_of_which_nothing_is_answered_has_no_json(tmp_path: Path) -> None:
    # Prompts have ids of a vocabulary that this model has not.
    options = ["--model-shape", "tiny", "--shrink", "64", "--budget", "0.2", "--arena-bytes", "256MiB"]
    options += ["--loads", "batch", "--out", str(tmp_path), "--port", str(free_port())]
    assert under_load.main(options) == 1
    assert not list(tmp_path.iterdir())
