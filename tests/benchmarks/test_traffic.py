"""Classes of requests side by side: what is asked when, and what is told of each class."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest
from commands import Command
from gateway_stack import Stack

from benchmarks.load.requests import RequestResult
from benchmarks.load.traffic import Slo, TrafficClass
from benchmarks.pages import render


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chats=512+64@3", TrafficClass("chats", 512, 64, rate=3.0)),
        ("chats=512+64@0.5", TrafficClass("chats", 512, 64, rate=0.5)),
        ("documents=100K+64x3", TrafficClass("documents", 100_000, 64, count=3, at_once=3)),
        ("batch=16K+128x16/8", TrafficClass("batch", 16_000, 128, count=16, at_once=8)),
        ("agents=8K~512+64*4@1", TrafficClass("agents", 512, 64, rate=1.0, shared_tokens=8000, turns=4)),
        (
            "known=1K~8K:512+64*4x3/1",
            TrafficClass("known", 512, 64, None, 3, 1, shared_tokens=1000, turns=4, opening_tokens=8000),
        ),
    ],
)
def test_a_class_is_read_from_one_word(text: str, expected: TrafficClass) -> None:
    assert TrafficClass.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["chats", "chats=512@3", "a=1+1", "a=0+1x1", "a=1+0x1", "a=1+1x0", "a=1+1@0", "a=1+1*0x1"]
)
def test_another_word_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        TrafficClass.parse(text)


def test_the_command_says_what_a_class_is(bench: Command) -> None:
    error = bench.refusal("serve", "--traffic", "chats")
    assert "'chats' is no class of requests; write NAME=" in error


def test_arrivals_are_as_many_as_the_rate_says_and_the_same_for_the_same_seed() -> None:
    chats = TrafficClass("chats", 10, 1, rate=3.0)
    times = chats.arrivals(1000.0, Random("1"))
    assert 2800 < len(times) < 3200
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 1000
    assert times == chats.arrivals(1000.0, Random("1"))
    assert TrafficClass("x", 10, 1, count=4, at_once=2).arrivals(1.0, Random("1")) == [0.0] * 4


def test_an_slo_asks_for_the_first_token_and_the_pace() -> None:
    result = RequestResult(0.2, 1.2, 1.3, 10, 11, 0, {})
    assert Slo().holds(result)
    assert Slo(ttft_ms=200, tpot_ms=100).holds(result)
    assert not Slo(ttft_ms=199).holds(result)
    assert not Slo(tpot_ms=99).holds(result)


def test_classes_share_a_server_and_are_told_apart(stack: Stack, tmp_path: Path, bench: Command) -> None:
    path = tmp_path / "traffic.json"
    classes = ["chats=20+4@40", "documents=60+2x3", "loop=30+3x5/1"]
    options = ["--traffic", *classes, "--duration", "0.5", "--policies", "pqcache", "--budget", "8"]
    bench.output("serve", "--url", stack.url, *options, "--slo-ttft", "60000", "--json", path)
    rows = {row["traffic"]["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert {name: row["num_done"] for name, row in rows.items() if name != "chats"} == {
        "documents": 3,
        "loop": 5,
    }
    assert rows["chats"]["num_done"] > 0
    assert all(row["num_failed"] == 0 and row["goodput"] > 0 and row["gap_ms"] for row in rows.values())
    asked = [
        (len(one.prompt_token_ids), one.sampling.max_tokens, one.policy) for one in stack.script.requests
    ]
    assert set(asked) == {(20, 4, "pqcache"), (60, 2, "pqcache"), (30, 3, "pqcache")}
    assert "chats" in render(path)


@pytest.mark.parametrize("api", ["carrel", "openai"])
def test_turns_grow_from_what_all_share(stack: Stack, tmp_path: Path, api: str, bench: Command) -> None:
    """Each prompt begins with one before."""
    path = tmp_path / "turns.json"
    options = ["--api", api, "--traffic", "agents=12~6+2*3x2", "--json", path]
    bench.output("serve", "--url", stack.url, *options)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["num_done"] == 6
    assert row["first_ttft_ms"]
    assert row["later_ttft_ms"]
    asked = [one.prompt_token_ids for one in stack.script.requests]
    for turn in range(2, 6):
        assert any(asked[turn][: len(prompt)] == prompt for prompt in asked[:turn])
    if api == "carrel":
        assert [len(prompt) for prompt in asked] == [18, 18, 26, 26, 34, 34]
        assert asked[0][:12] == asked[1][:12]
        assert asked[0] != asked[1]


def test_a_conversation_begins_with_its_own_opening(stack: Stack, tmp_path: Path, bench: Command) -> None:
    path = tmp_path / "known.json"
    bench.output("serve", "--url", stack.url, "--traffic", "known=30:6+2*2x2/1", "--json", path)
    asked = [one.prompt_token_ids for one in stack.script.requests]
    assert [len(prompt) for prompt in asked] == [36, 44, 36, 44]
    assert asked[1][:36] == asked[0]
    assert asked[3][:36] == asked[2]
    assert asked[2][:30] != asked[0][:30]
    # JSON of before has the median of both only.
    content = json.loads(path.read_text())
    for name in ("first_ttft_ms", "num_pieces", "traffic.opening_tokens"):
        outer, _, inner = name.partition(".")
        del (content["rows"][0][outer] if inner else content["rows"][0])[inner or outer]
    path.write_text(json.dumps(content))
    assert "known" in render(path)


@pytest.mark.parametrize("load", [["--traffic", "chats=20+8x2"], ["--concurrency", "1", "--max-tokens", "8"]])
def test_tokens_without_text_are_told_of(stack: Stack, load: list[str], bench: Command) -> None:
    options = ["serve", "--url", stack.url, "--requests", "2", "--prompt-tokens", "20", *load]
    assert "pieces of text" not in bench.output(*options)
    stack.say("<|end|>" * 8)
    assert "16 tokens came in 2 pieces of text: first tokens and the time" in bench.output(*options)


def test_any_openai_server_will_do(stack: Stack, bench: Command) -> None:
    """Text in place of token ids, and none of Carrel's fields."""
    bench.output("serve", "--url", stack.url, "--api", "openai", "--traffic", "chats=20+4x2")
    asked = stack.script.requests
    assert len(asked) == 2
    assert {one.policy for one in asked} == {""}
