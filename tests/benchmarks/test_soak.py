"""A soak tells what failed, what was answered otherwise than alone, and what grew."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path

import pytest
from commands import Command
from gateway_stack import Stack

from benchmarks.commands.soak import worker_gauges
from benchmarks.load.processes import process_gauges
from benchmarks.load.questions import Answer
from benchmarks.load.soak_row import Waits
from benchmarks.pages import render

SHORT = ["--minutes", "0.02", "--every", "0.2", "--streams", "4", "--questions", "4", "--prompt-tokens", "64"]
SHORT += ["--policies", "server", "full", "pqcache"]


def test_every_question_is_answered_as_alone_whatever_goes_on_beside(
    stack: Stack, tmp_path: Path, bench: Command
) -> None:
    path = tmp_path / "soak.json"
    bench.output("soak", "--url", stack.url, *SHORT, "--server", os.getpid(), "--json", path)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["num_answered"] > 0
    assert row["num_aborted"] > 0
    assert (row["num_failed"], row["num_differing"]) == (0, 0)
    names = {meter["name"] for meter in row["meters"]}
    assert {"running", "slot_used_tokens", "supervisor own MiB", "supervisor descriptors"} <= names
    asked = stack.script.requests
    assert {one.policy for one in asked} == {"", "full", "pqcache"}
    assert any(one.cache_salt for one in asked)
    assert any(one.session_id for one in asked)
    assert "answered otherwise" in render(path)


@pytest.mark.parametrize("margin", [0.25, 2.0])
def test_another_answer_than_alone_is_no_success_but_where_it_leaves_that_at_a_near_tie(
    stack: Stack, tmp_path: Path, margin: float, bench: Command
) -> None:
    path = tmp_path / "soak.json"
    script = stack.say("the quick brown fox", token_s=0.001, margin=margin)

    def change_when_all_were_asked_alone() -> None:
        while len(script.requests) <= 4:
            time.sleep(0.01)
        stack.say("the quick brown dog", token_s=0.001)

    changing = threading.Thread(target=change_when_all_were_asked_alone)
    changing.start()
    is_tied = margin < 0.5
    ended = bench("soak", "--url", stack.url, *SHORT, "--near-tie", "0.5", "--json", path)
    assert ended.code == (0 if is_tied else 1)
    changing.join()
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["num_tied"] > 0, row["num_differing"] > 0) == (is_tied, not is_tied)
    assert row["widest_tie"] == (pytest.approx(margin) if is_tied else None)
    assert is_tied or row["first_difference"] > 0.5
    assert {wrong["margin"] for wrong in row["wrong"]} == (set() if is_tied else {margin})
    assert {wrong["policy"] for wrong in row["wrong"]} <= {None, "full", "pqcache"}


def test_other_text_of_the_same_tokens_is_no_near_tie() -> None:
    alone = Answer(["a", "b"], [1, 2], [0.0, 0.1])
    assert alone.departure(alone, is_whole=True) is None
    assert Answer(["a"], [1]).departure(alone, is_whole=False) is None
    assert Answer(["a"], [1]).departure(alone, is_whole=True) == (1, math.inf)
    assert Answer(["a", "c"], [1, 2]).departure(alone, is_whole=True) == (2, math.inf)
    assert Answer(["a", "c"], [1, 3]).departure(alone, is_whole=True) == (1, 0.1)


def test_a_siege_tells_what_an_honest_client_waits_and_what_is_left(
    stack: Stack, tmp_path: Path, bench: Command
) -> None:
    path = tmp_path / "siege.json"
    sizes = ["--bodies", "30", "--slow", "6", "--unread", "4", "--leaving", "4", "--prompt-tokens", "32"]
    bench("siege", "--url", stack.url, "--minutes", "0.03", "--alone", "0.5", *sizes, "--json", path)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["num_besieged"] > 0
    assert row["num_failed"] == 0
    assert sum(row["repulse"]["statuses"].values()) == 30
    assert not {"500", "none", "late"} & set(row["repulse"]["statuses"])
    assert min(row["repulse"][each] for each in ("num_slow", "num_unread", "num_left")) >= 4
    # the fake worker says that it runs one
    assert row["gauges"]["places"][1] == 0
    assert "30 random bodies" in render(path)


def test_waits_are_told_by_the_nearest_rank() -> None:
    assert Waits.of([]) is None
    assert Waits.of(range(1, 101)) == Waits(100, 50, 99, 100)


def test_gauges_are_read_by_name() -> None:
    text = 'carrel_worker_running{model_name="m"} 3.0\ncarrel_worker_other{model_name="m"} 1.0\nrunning 9\n'
    assert worker_gauges(text) == {"running": 3.0}
    assert process_gauges(2**30) == {}
