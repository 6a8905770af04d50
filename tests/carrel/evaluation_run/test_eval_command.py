"""`carrel eval` against a worker that knows the answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from answering_worker import DEVICE_BYTES, HOST_BYTES, LENGTH, NUM_DOCUMENTS, PREFILL_MS, STEP_MS, FakeRun

from carrel.evaluation import worker_client
from carrel.evaluation.record import read_report
from carrel.evaluation.suite import ANSWER_TOKENS, Suite

MakeRun = Callable[..., FakeRun]


@pytest.mark.parametrize(
    ("policies", "named"),
    [
        ([], ("full", "oracle", "pqcache", "clusterkv")),
        # every method of the worker
        (["all", "snapkv+adakv"], ("full", "clusterkv", "oracle", "pqcache", "snapkv", "snapkv+adakv")),
        (["ablations"], ("pqcache", "clusterkv", "clusterkv+l2", "clusterkv+ip")),
    ],
)
def test_every_cell_asks_the_same_questions(
    fake_run: MakeRun, policies: list[str], named: tuple[str, ...]
) -> None:
    run = fake_run()
    run(*(["--policies", *policies] if policies else []))
    asked = Counter((request.policy, request.num_prefill_tokens > 0) for request in run.worker.requests)
    assert asked == {(policy, is_p2): NUM_DOCUMENTS for policy in named for is_p2 in (False, True)}
    assert run.worker.requests[0].policy == named[0]
    prompts = {tuple(request.prompt_token_ids) for request in run.worker.requests}
    assert len(prompts) == NUM_DOCUMENTS
    assert all(len(prompt) <= LENGTH - ANSWER_TOKENS for prompt in prompts)


def test_p2_prefills_the_context_alone(fake_run: MakeRun, suite: Suite) -> None:
    run = fake_run()
    run("--protocols", "P2", "--policies", "pqcache")
    questions = [suite.question("mixed", LENGTH, index) for index in range(NUM_DOCUMENTS)]
    contexts = {question.context_ids + question.question_ids: question.context_ids for question in questions}
    for request in run.worker.requests:
        prompt = tuple(request.prompt_token_ids)
        assert prompt[: request.num_prefill_tokens] == contexts[prompt]
        assert request.measure
        assert request.sampling.temperature == 0
        assert request.budget.share == 0.2


def test_the_report_holds_scores_and_costs(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(wrong=("pqcache",)), tmp_path / "report.json"
    options = ["--policy-options", "pqcache:num_bits=5,num_sink=4", "quest:page_size=8"]
    shown = run("--json", path, "--protocols", "P1", *options).out
    assert read_report(path).source.policy_options == "pqcache:num_bits=5,num_sink=4,quest:page_size=8"
    results = {result.cell.policy: result for result in read_report(path).results()}
    assert {policy: result.exact_match for policy, result in results.items()} == {
        "full": 1.0,
        "oracle": 1.0,
        "pqcache": 0.0,
        "clusterkv": 1.0,
    }
    assert results["full"].low == pytest.approx(0.61, abs=0.01)
    assert results["full"].attention_mass is None
    assert results["full"].cell.budget is None
    assert (results["oracle"].attention_mass, results["oracle"].recall_rate) == (0.75, 0.5)
    assert results["oracle"].bytes_moved == 2**20
    assert "| mixed | 1K | P1 | pqcache | n/5 | 6 | 0.00 (0.00-0.39) | 0.00 (0.00-0.00) |" in shown
    assert "oracle loses +0.000 against full (target: at most 0.03): met" in shown
    assert "pqcache loses +1.000 against oracle (target: at most 0.05): MISSED" in shown
    about = json.loads(path.read_text())["about"]
    assert {"versions", "machine", "command", "date"} <= set(about)


def test_a_budget_may_be_a_number_of_tokens(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = ("--policies", "oracle", "--protocols", "P1", "--json", path, "--budgets", "0.5", "256")
    shown = run(*arguments).out
    kinds = Counter((request.budget.share, request.budget.tokens) for request in run.worker.requests)
    assert kinds == {(0.5, 0): NUM_DOCUMENTS, (0, 256): NUM_DOCUMENTS}
    assert [cell["cell"]["budget"] for cell in json.loads(path.read_text())["cells"]] == [0.5, 256]
    assert "| mixed | 1K | P1 | oracle | 256 | 6 |" in shown
    run(*arguments, "--resume")
    assert len(run.worker.requests) == 2 * NUM_DOCUMENTS


def test_memory_is_told_of_what_a_policy_keeps(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    shown = run("--policies", "full", "oracle", "snapkv", "--protocols", "P1", "--json", path).out
    full, oracle, snapkv = read_report(path).results()
    assert {full.device_bytes, oracle.device_bytes, snapkv.device_bytes} == {DEVICE_BYTES}
    assert (full.host_bytes, oracle.host_bytes, snapkv.host_bytes) == (0, HOST_BYTES, 0)
    # Its rows were in the store to be measured by: it hits nothing, and moves nothing.
    assert "| 0.750 | 0.500 | 0.625 | 100 | - | 3.00 | 0 | - | - | - |" in shown
    assert "| 0.750 | 0.500 | 0.625 | 100 | 0.900 | 3.00 | 5.00 | 1.0 | - | - |" in shown


@pytest.mark.parametrize("protocol", ["P1", "P2"])
def test_times_are_compared_where_nothing_is_measured(
    fake_run: MakeRun, tmp_path: Path, protocol: str
) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    arguments = ("--policies", "full", "oracle", "--protocols", protocol, "--json", path)
    shown = run(*arguments, "--no-measure").out
    assert not any(request.measure for request in run.worker.requests)
    full, oracle = read_report(path).results()
    assert (full.median_prefill_ms, full.median_step_ms) == (PREFILL_MS, pytest.approx(STEP_MS))
    assert (oracle.attention_mass, oracle.recall_rate) == (None, None)
    assert "| - | - | - | 100 | - | 3.00 | 0 | - | 1.00 | 1.00 |" in shown
    assert "| - | - | - | 100 | 0.900 | 3.00 | 5.00 | 1.0 | 2.00 | 0.50 |" in shown
    # A run that measures is another one.
    assert "is_measured (False there, True here)" in run(*arguments, "--resume", code=1).err


def test_a_budget_that_a_policy_refuses_leaves_its_cell_out(fake_run: MakeRun, tmp_path: Path) -> None:
    run, path = fake_run(), tmp_path / "report.json"
    run.worker.least_budget = 100
    arguments = ["--policies", "snapkv", "oracle", "--protocols", "P1", "--budgets", "64", "128"]
    notes = run(*arguments, "--json", path).err
    assert [(result.cell.policy, result.cell.budget) for result in read_report(path).results()] == [
        ("snapkv", 128),
        ("oracle", 64),
        ("oracle", 128),
    ]
    assert "left out: mixed 1K P1 snapkv 64: snapkv needs more tokens" in notes


def test_a_busy_worker_is_asked_again(fake_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "BUSY_PAUSE_S", 0.01)
    run = fake_run()
    run.worker.num_busy = 3
    run("--policies", "full", "--protocols", "P1")
    assert len(run.worker.requests) == NUM_DOCUMENTS


def test_a_worker_of_another_model_is_not_asked_in_the_default_ones_tokens(fake_run: MakeRun) -> None:
    run = fake_run()
    run.worker.model = "/models/another"
    refused = run.without("--model")("--policies", "full", code=1)
    assert "serves another; name it by --model" in refused.err
    assert not run.worker.requests
    # who names the model knows it by this name
    run("--policies", "full", "--protocols", "P1")


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--policies", "quest"], 1, "no policy quest"),
        (["--lengths", "4096"], 1, "beyond the worker's 2048 tokens"),
        (["--resume"], 2, "--resume needs --json"),
    ],
)
def test_what_cannot_be_run_is_refused(fake_run: MakeRun, extra: list[str], code: int, message: str) -> None:
    run = fake_run()
    assert message in run(*extra, code=code).err
    assert not run.worker.requests
