"""Runs of `carrel eval` in parts: rounds, shards, what is measured, and how they end and go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from answering_worker import LENGTH, NUM_DOCUMENTS, FakeRun
from waiting import PATIENCE, wait_until

from carrel.evaluation.record import read_report
from carrel.evaluation.suite import Suite

MakeRun = Callable[..., FakeRun]
ROOT = Path(__file__).resolve().parents[3]


def test_an_interrupted_run_goes_on_where_it_ended(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = ("--json", path, "--policies", "full", "oracle", "--protocols", "P1")
    run.worker.fail_from = 8
    error = run(*arguments, code=1).err
    assert "UNAVAILABLE: the store is gone" in error
    assert "Traceback" not in error
    num_first = sum(result.n for result in read_report(path).results())
    assert 0 < num_first <= 8
    run.worker.fail_from = None
    run.worker.requests.clear()
    run(*arguments, "--resume")
    # A call of the first run may reach a busy server only now: its question is one that is asked again.
    asked = {(request.policy, tuple(request.prompt_token_ids)) for request in run.worker.requests}
    assert len(asked) == 2 * NUM_DOCUMENTS - num_first
    assert [result.n for result in read_report(path).results()] == [NUM_DOCUMENTS] * 2


def test_a_cut_off_run_has_asked_every_cell_the_same(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = ("--json", path, "--policies", "full", "oracle", "--rounds-of", "2")
    # Four cells: two rounds, and one cell of the last.
    run.worker.fail_from = 18
    run(*arguments, "--concurrency", "1", code=1)
    assert [result.n for result in read_report(path).results()] == [6, 4, 4, 4]
    run.worker.fail_from = None
    run(*arguments, "--resume")
    assert len(run.worker.requests) == 4 * NUM_DOCUMENTS
    assert [result.n for result in read_report(path).results()] == [NUM_DOCUMENTS] * 4


def test_a_run_whose_time_is_up_ends_well(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = ("--json", path, "--policies", "full", "--limit-seconds")
    assert "out of time" in run(*arguments, "0").err
    assert (run.worker.requests, read_report(path).results()) == ([], [])
    assert "out of time" not in run(*arguments, "600", "--resume").err


def test_a_report_names_the_commits_of_all_its_runs(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = ("--json", path, "--policies", "full", "--protocols", "P1", "--shard")
    run(*arguments, "0/2")
    content = json.loads(path.read_text())
    now = content["about"]["versions"]["commit"]
    content["about"]["versions"]["commit"] = "abc"
    path.write_text(json.dumps(content))
    for _ in range(2):
        run(*arguments, "1/2", "--resume")
        assert read_report(path).about["versions"]["commit"] == f"abc, {now}"
    merged = tmp_path / "merged.json"
    run.command.output("eval", "--merge", path, path, "--json", merged)
    assert read_report(merged).about["versions"]["commit"] == f"abc, {now}"


def test_a_terminated_run_keeps_what_it_had(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = ["--json", str(path), "--policies", "full", "oracle", "--rounds-of", "2"]
    arguments += ["--concurrency", "1"]
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
    arguments = ["--policies", "full", "oracle", "--protocols", "P1", "--rounds-of", "2"]
    arguments += ["--measure-documents", "3"]
    parts = [tmp_path / f"{index}.json" for index in range(2)]
    for index, part in enumerate(parts):
        run(*arguments, "--shard", f"{index}/2", "--json", part)
        run(*arguments, "--shard", f"{index}/2", "--json", part, "--resume")
    measured = Counter(tuple(request.prompt_token_ids) for request in run.worker.requests if request.measure)
    questions = [suite.question("mixed", LENGTH, index) for index in range(3)]
    assert measured == {question.context_ids + question.question_ids: 2 for question in questions}
    assert len(run.worker.requests) == 2 * NUM_DOCUMENTS
    # Of each cell of a shard the measured ones come first.
    asked = [(request.policy, request.measure) for request in run.worker.requests]
    assert asked[:2] == [("full", True)] * 2
    merged = tmp_path / "merged.json"
    run.command.output("eval", "--merge", *parts, "--json", merged)
    full, oracle = json.loads(merged.read_text())["cells"]
    assert (oracle["result"]["n"], oracle["result"]["num_measured"]) == (NUM_DOCUMENTS, 3)
    assert (full["result"]["num_measured"], full["result"]["attention_mass"]) == (3, None)
    assert (oracle["result"]["attention_mass"], oracle["result"]["recall_rate"]) == (0.75, 0.5)
    assert oracle["result"]["median_step_ms"] is None


def test_a_policy_that_fails_does_not_end_the_run(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    run.worker.broken = ("snapkv",)
    arguments = ("--policies", "snapkv", "oracle", "--protocols", "P1", "--json", path)
    error = run(*arguments, "--rounds-of", "2", code=1).err
    assert error.count("left out: mixed 1K P1 snapkv n/5") == 1
    assert "answers failed in mixed 1K P1 snapkv n/5; --resume asks them again" in error
    assert [(result.cell.policy, result.n) for result in read_report(path).results()] == [
        ("oracle", NUM_DOCUMENTS)
    ]
    run.worker.broken = ()
    run(*arguments, "--resume")
    assert len(run.worker.requests) == 2 * NUM_DOCUMENTS


def test_another_runs_report_is_not_continued(fake_run: MakeRun, tmp_path: Path) -> None:
    run = fake_run()
    arguments = ("--json", tmp_path / "report.json", "--policies", "full", "--protocols", "P1")
    run(*arguments)
    assert "seed (7 there, 8 here)" in run(*arguments, "--resume", "--seed", "8", code=1).err
