"""`carrel bench serve` against a real gateway with a fake worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from commands import Command
from fake_worker import Script
from gateway_stack import Stack
from waiting import PATIENCE

from benchmarks.errors import BenchmarkError
from benchmarks.load.client import LoadClient
from benchmarks.load.requests import Asked, Percentiles, RequestResult
from benchmarks.load.traffic import ClassRow, Slo, TrafficClass, run_traffic
from benchmarks.pages import render

CLIENTS = TrafficClass("clients", 40, 6, count=5, at_once=2)
ASKED = Asked("pqcache", 8, 6)


def run(stack: Stack, clients: TrafficClass, asked: Asked, kind: type[LoadClient] = LoadClient) -> ClassRow:
    async def load() -> ClassRow:
        async with kind(stack.url, None, PATIENCE) as client:
            model = await client.model()
            (row,) = await run_traffic(client, model, [clients], asked, 0.0, "1", Slo(), lambda: None)
            return row

    return asyncio.run(load())


def test_every_request_is_as_the_class_says(stack: Stack) -> None:
    stack.say("the quick brown fox jumps over", token_s=0.01)
    row = run(stack, CLIENTS, ASKED)
    assert (row.num_done, row.num_failed) == (5, 0)
    # what the fake worker tells of itself
    assert (row.cached_tokens, row.attended_tokens, row.hit_rate, row.bytes_moved) == (15, 2.5, 0.5, 7)
    assert row.ttft_ms is not None
    assert row.tpot_ms is not None
    # a busy machine makes it more
    assert row.tpot_ms.p50 > 5
    assert row.output_tokens_per_s == pytest.approx(30 / row.duration_s)
    asked = stack.script.requests
    assert {len(request.prompt_token_ids) for request in asked} == {40}
    assert len({tuple(request.prompt_token_ids) for request in asked}) == 5
    assert {(request.policy, request.budget.tokens) for request in asked} == {("pqcache", 8)}
    assert all(request.sampling.ignore_eos and request.sampling.max_tokens == 6 for request in asked)


def test_prompts_may_share_their_start(stack: Stack) -> None:
    run(stack, TrafficClass("clients", 10, 2, None, 3, 1, shared_tokens=30), Asked(None, None, 2))
    asked = [list(request.prompt_token_ids) for request in stack.script.requests]
    assert len({tuple(prompt[:30]) for prompt in asked}) == 1
    assert len({tuple(prompt) for prompt in asked}) == 3
    assert stack.script.requests[0].policy == ""


def test_no_more_than_the_concurrency_is_under_way(stack: Stack) -> None:
    stack.say("the quick brown fox jumps over the lazy dog", token_s=0.01)
    most = []

    class Counting(LoadClient):
        num_running = 0

        async def complete(self, model: str, prompt: list[int] | str, asked: Asked) -> RequestResult:
            self.num_running += 1
            most[-1] = max(most[-1], self.num_running)
            try:
                return await super().complete(model, prompt, asked)
            finally:
                self.num_running -= 1

    for at_once in (1, 4):
        most.append(0)
        clients = TrafficClass("clients", 20, 8, count=8, at_once=at_once)
        run(stack, clients, Asked(None, None, 8), Counting)
    assert most == [1, 4]


def test_failures_are_counted_and_told(stack: Stack) -> None:
    stack.script = Script(reply=[70, 71], fail_at=1, fail_with=(grpc.StatusCode.INTERNAL, "broken", ()))
    row = run(stack, CLIENTS, ASKED)
    assert (row.num_done, row.num_failed) == (0, 5)
    assert row.error
    assert row.ttft_ms is None
    stack.say("the")
    refused = run(stack, TrafficClass("clients", 20, 2, count=1, at_once=1), Asked("no-such-policy", None, 2))
    assert refused.num_failed == 1
    assert "no-such-policy" in str(refused.error)


def test_percentiles() -> None:
    assert Percentiles.of([]) is None
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 3.0)
    found = Percentiles.of(float(value) for value in range(101))
    assert found == Percentiles(50.0, 95.0, 99.0)


def test_a_single_token_has_no_time_between_tokens(stack: Stack) -> None:
    assert RequestResult(0.5, 0.5, 0.6, 10, 1, 0, {}).tpot_s is None
    row = run(stack, TrafficClass("clients", 20, 1, count=1, at_once=1), Asked(None, None, 1))
    assert row.tpot_ms is None
    assert row.ttft_ms is not None


def test_a_run_writes_a_table_and_json(stack: Stack, tmp_path: Path, bench: Command) -> None:
    path = tmp_path / "serve.json"
    options = ["--policies", "full", "pqcache", "--budget", "0.5", "--concurrency", "1", "2"]
    options += ["--prompt-tokens", "20", "--max-tokens", "4", "--requests", "2"]
    table = bench.output("serve", "--url", stack.url, *options, "--json", path)
    content = json.loads(path.read_text())
    assert [(row["policy"], row["traffic"]["at_once"]) for row in content["rows"]] == [
        ("full", 1), ("full", 2), ("pqcache", 1), ("pqcache", 2),
    ]  # fmt: skip
    assert content["shapes"]["model"] == "tiny"
    assert table.strip() in render(path)
    shares = [request.budget.share for request in stack.script.requests if request.policy == "pqcache"]
    assert shares
    assert set(shares) == {0.5}


def test_a_run_without_an_answer_ends_with_one(stack: Stack, bench: Command) -> None:
    options = ["--policies", "no-such-policy", "--concurrency", "1", "--prompt-tokens", "20"]
    ended = bench("serve", "--url", stack.url, *options)
    assert (ended.code, "4 failed" in ended.out) == (1, True)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense"])
def test_no_server_is_one_line(url: str, bench: Command) -> None:
    error = bench.refusal("serve", "--url", url, code=1)
    assert f"no server at {url}" in error
    assert error.count("\n") == 1


def test_a_server_that_refuses_is_told(stack: Stack) -> None:
    async def ask() -> None:
        async with LoadClient(f"{stack.url}/nowhere", None, PATIENCE) as client:
            await client.model()

    with pytest.raises(BenchmarkError, match="There is no route"):
        asyncio.run(ask())
