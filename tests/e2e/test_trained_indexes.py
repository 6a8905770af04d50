"""README's line for the papers' machinery: trainers of low priority fit the indexes, and the store searches them and
gathers rows, as its metrics count them."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass

import httpx
import pytest
from questions import ask
from serving import ROOT, Serving, serving
from waiting import PATIENCE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LAYERS = 8
TRAININGS = "carrel_store_index_trainings_total"
GATHERED = "carrel_store_gathered_rows_total"
STORE_SEARCHES = "carrel_store_index_search_seconds_count"
WORKER_SEARCHES = "carrel_worker_index_search_seconds_count"


@dataclass(frozen=True)
class Counts:
    """Counts of a server's work for its indexes."""

    trainings: float
    gathered_rows: float
    store_searches: float
    worker_searches: float

    def __sub__(self, before: Counts) -> Counts:
        return Counts(
            self.trainings - before.trainings,
            self.gathered_rows - before.gathered_rows,
            self.store_searches - before.store_searches,
            self.worker_searches - before.worker_searches,
        )


def counts(server: Serving) -> Counts:
    found = {}
    for line in httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text.splitlines():
        name, _, value = line.rpartition(" ")
        found[name.partition("{")[0]] = value
    return Counts(*(float(found[name]) for name in (TRAININGS, GATHERED, STORE_SEARCHES, WORKER_SEARCHES)))


def options_of_readme() -> list[str]:
    """Return the options of the README's command, as make passes them on."""
    [line] = re.findall(
        r'^\$ make serve ARGS="(.+--transport[^"]+)"', (ROOT / "README.md").read_text(), re.MULTILINE
    )
    return shlex.split(line)


def answer(server: Serving, seed: int, carrel: dict[str, str]) -> str:
    """The policy that answered, rightly."""
    question = ask(3000, seed=seed)
    body = {
        "messages": [{"role": "user", "content": question.text}],
        "temperature": 0,
        "max_tokens": 16,
        "carrel": carrel,
    }
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
    assert reply["choices"][0]["message"]["content"].strip().rstrip(".") == question.answer
    return str(reply["usage"]["carrel"]["policy"])


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_the_store_trains_searches_and_gathers(transport: str) -> None:
    options = options_of_readme()
    assert options[options.index("--policy") + 1] == "pqcache"
    options[options.index("--transport") + 1] = transport
    with serving(*options) as server:
        trainers = [each.nice() for each in server.descendants() if "TrainerActor" in "".join(each.cmdline())]
        assert trainers == [max(os.nice(0), 15)]
        for seed, (policy, carrel) in enumerate([("pqcache", {}), ("clusterkv", {"policy": "clusterkv"})]):
            before = counts(server)
            assert answer(server, seed, carrel) == policy
            done = counts(server) - before
            assert done.trainings == LAYERS
            assert done.gathered_rows > 0
            # over gRPC the worker has no index
            assert (done.store_searches > 0) == (transport == "grpc")
            assert done.worker_searches > 0
