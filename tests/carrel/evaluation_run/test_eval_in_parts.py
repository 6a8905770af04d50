"""Runs of `carrel eval` in parts: rounds, shards, what is measured, and how they end and go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from answering_worker import LENGTH, NUM_DOCUMENTS, FakeRun
from waiting import PATIENCE, wait_until

from carrel.cli import main
from carrel.evaluation.record import read_report
from carrel.evaluation.suite import Suite

MakeRun = Callable[..., FakeRun]
ROOT = Path(__file__).resolve().parents[3]


def test_an_interrupted_run_goes_on_where_it_ended(
    fake_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = [*run.arguments, "--json", str(path), "--policies", "full", "oracle", "--protocols", "P1"]
    run.worker.fail_from = 8
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "UNAVAILABLE: the store is gone" in error
    assert "Traceback" not in error
    first = [
        outcome
        for result in read_report(path).results()
        for outcome in read_report(path).outcomes(result.cell)
    ]
    assert 0 < len(first) <= 8
    run.worker.fail_from = None
    run.worker.requests.clear()
    assert main([*arguments, "--resume"]) == 0
    # A call of the first run may reach a busy server only now: its question is one that is asked again.
    asked = {(request.policy, tuple(request.prompt_token_ids)) for request in run.worker.requests}
    assert len(asked) == 2 * NUM_DOCUMENTS - len(first)
    assert [result.n for result in read_report(path).results()] == [NUM_DOCUMENTS] * 2


def test_a_cut_off_run_has_asked_every_cell_the_same(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = [*run.arguments, "--json", str(path), "--policies", "full", "oracle", "--rounds-of", "2"]
    # Four cells: two rounds, and one cell of the last.
    run.worker.fail_from = 18
    assert main([*arguments, "--concurrency", "1"]) == 1
    assert [result.n for result in read_report(path).results()] == [6, 4, 4, 4]
    run.worker.fail_from = None
    assert main([*arguments, "--resume"]) == 0
    assert len(run.worker.requests) == 4 * NUM_DOCUMENTS
    assert [result.n for result in read_report(path).results()] == [NUM_DOCUMENTS] * 4


def test_a_run_whose_time_is_up_ends_well(
    fake_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = [*run.arguments, "--json", str(path), "--policies", "full"]
    assert main([*arguments, "--limit-seconds", "0"]) == 0
    assert "out of time" in capsys.readouterr().err
    assert (run.worker.requests, read_report(path).results()) == ([], [])
    assert main([*arguments, "--limit-seconds", "600", "--resume"]) == 0
    assert "out of time" not in capsys.readouterr().err


def test_a_report_names_the_commits_of_all_its_runs(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = [*run.arguments, "--json", str(path), "--policies", "full", "--protocols", "P1"]
    assert main([*arguments, "--shard", "0/2"]) == 0
    content = json.loads(path.read_text())
    now = content["about"]["versions"]["commit"]
    content["about"]["versions"]["commit"] = "abc"
    path.write_text(json.dumps(content))
    for _ in range(2):
        assert main([*arguments, "--shard", "1/2", "--resume"]) == 0
        assert read_report(path).about["versions"]["commit"] == f"abc, {now}"
    merged = tmp_path / "merged.json"
    assert main(["eval", "--merge", str(path), str(path), "--json", str(merged)]) == 0
    assert read_report(merged).about["versions"]["commit"] == f"abc, {now}"


def test_a_terminated_run_keeps_what_it_had(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = [
        "--json",
        str(path),
        "--policies",
        "full",
        "oracle",
        "--rounds-of",
        "2",
        "--concurrency",
        "1",
    ]
    run.worker.holds_from = 10
    process = subprocess.Popen(
        [sys.executable, "-m", "carrel", *run.arguments, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: len(run.worker.requests) >= 11 or process.poll() is not None)
        assert process.poll() is None
        # twice, as from `timeout`
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        wait_until(path.exists)
        assert process.wait(PATIENCE) == 130
    finally:
        run.worker.released.set()
        process.kill()
        process.wait()
    assert [result.n for result in read_report(path).results()] == [4, 2, 2, 2]
    assert not path.with_name("report.json.partial").exists()


def test_some_documents_are_measured(fake_run: MakeRun, tmp_path: Path, suite: Suite) -> None:
    run = fake_run()
    arguments = [*run.arguments, "--policies", "full", "oracle", "--protocols", "P1", "--rounds-of", "2"]
    arguments += ["--measure-documents", "3"]
    parts = [tmp_path / f"{index}.json" for index in range(2)]
    for index, part in enumerate(parts):
        assert main([*arguments, "--shard", f"{index}/2", "--json", str(part)]) == 0
        assert main([*arguments, "--shard", f"{index}/2", "--json", str(part), "--resume"]) == 0
    measured = Counter(tuple(request.prompt_token_ids) for request in run.worker.requests if request.measure)
    questions = [suite.question("mixed", LENGTH, index) for index in range(3)]
    assert measured == {question.context_ids + question.question_ids: 2 for question in questions}
    assert len(run.worker.requests) == 2 * NUM_DOCUMENTS
    # Of each cell of a shard the measured ones come first.
    asked = [(request.policy, request.measure) for request in run.worker.requests]
    assert asked[:2] == [("full", True)] * 2
    merged = tmp_path / "merged.json"
    assert main(["eval", "--merge", *map(str, parts), "--json", str(merged)]) == 0
    full, oracle = json.loads(merged.read_text())["cells"]
    assert (oracle["result"]["n"], oracle["result"]["num_measured"]) == (NUM_DOCUMENTS, 3)
    assert (full["result"]["num_measured"], full["result"]["attention_mass"]) == (3, None)
    assert (oracle["result"]["attention_mass"], oracle["result"]["recall_rate"]) == (0.75, 0.5)
    assert oracle["result"]["median_step_ms"] is None


def test_a_policy_that_fails_does_not_end_the_run(
    fake_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    run.worker.broken = ("snapkv",)
    arguments = [*run.arguments, "--policies", "snapkv", "oracle", "--protocols", "P1", "--json", str(path)]
    assert main([*arguments, "--rounds-of", "2"]) == 1
    error = capsys.readouterr().err
    assert error.count("left out: mixed 1K P1 snapkv n/5") == 1
    assert "answers failed in mixed 1K P1 snapkv n/5; --resume asks them again" in error
    assert [(result.cell.policy, result.n) for result in read_report(path).results()] == [
        ("oracle", NUM_DOCUMENTS)
    ]
    run.worker.broken = ()
    assert main([*arguments, "--resume"]) == 0
    assert len(run.worker.requests) == 2 * NUM_DOCUMENTS


def test_another_runs_report_is_not_continued(
    fake_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = ["--json", str(path), "--policies", "full", "--protocols", "P1"]
    assert main([*run.arguments, *arguments]) == 0
    assert main([*run.without("--seed"), *arguments, "--resume", "--seed", "8"]) == 1
    assert "seed (7 there, 8 here)" in capsys.readouterr().err
