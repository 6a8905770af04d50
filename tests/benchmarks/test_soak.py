"""A soak tells what failed, what was answered otherwise than alone, and what grew."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_stack import Stack, running_stack, write_tokenizer

from benchmarks.__main__ import main
from benchmarks.commands.soak import process_gauges, worker_gauges
from benchmarks.report import render

SHORT = ["--minutes", "0.02", "--every", "0.2", "--streams", "4", "--questions", "4", "--prompt-tokens", "64"]
SHORT += ["--policies", "server", "full", "pqcache"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = write_tokenizer(tmp_path_factory.mktemp("tiny"))
    with running_stack(tmp_path_factory.mktemp("soak"), model) as running:
        yield running


def test_every_question_is_answered_as_alone_whatever_goes_on_beside(stack: Stack, tmp_path: Path) -> None:
    stack.say("the quick brown fox jumps", token_s=0.001)
    path = tmp_path / "soak.json"
    own = f"self={os.getpid()}"
    assert main(["soak", "--url", stack.url, *SHORT, "--process", own, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["num_answered"] > 0
    assert row["num_aborted"] > 0
    assert (row["num_failed"], row["num_differing"]) == (0, 0)
    names = {meter["name"] for meter in row["meters"]}
    assert {"running", "slot_used_tokens", "self own MiB", "self descriptors"} <= names
    asked = stack.script.requests
    assert {one.policy for one in asked} == {"", "full", "pqcache"}
    assert any(one.cache_salt for one in asked)
    assert any(one.session_id for one in asked)
    assert "answered otherwise" in render(path)


def test_another_answer_than_alone_is_no_success(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    stack.say("the quick brown fox", token_s=0.001)
    script = stack.script

    def change_when_all_were_asked_alone() -> None:
        while len(script.requests) <= 4:
            time.sleep(0.01)
        stack.say("the quick brown dog", token_s=0.001)

    changing = threading.Thread(target=change_when_all_were_asked_alone)
    changing.start()
    assert main(["soak", "--url", stack.url, *SHORT, "--json", str(path)]) == 1
    changing.join()
    (row,) = json.loads(path.read_text())["rows"]
    assert row["num_differing"] > 0
    assert row["first_difference"] > 0.5


def test_gauges_are_read_by_name() -> None:
    text = 'carrel_worker_running{model_name="m"} 3.0\ncarrel_worker_other{model_name="m"} 1.0\nrunning 9\n'
    assert worker_gauges(text) == {"running": 3.0}
    assert process_gauges(2**30) == {}
