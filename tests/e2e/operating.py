"""An operator's view of a real server: metrics of all three processes, and a log of objects without prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from serving import Serving

LAYERS = 8
# Trainings and gathered rows of the store, and searches by the store and by the worker.
COUNTED = (
    "carrel_store_index_trainings_total",
    "carrel_store_gathered_rows_total",
    "carrel_store_index_search_seconds_count",
    "carrel_worker_index_search_seconds_count",
)


def check_operating(server: Serving, prompt: str) -> None:
    """After requests, of which one had this prompt, and some let the store select."""
    samples = server.samples()
    values = {sample.name: sample.value for sample in samples}
    assert values["carrel_store_leases"] == values["carrel_worker_store_reachable"] == 1
    assert values["carrel_store_arena_bytes"] == server.store_stats().arena_bytes
    assert values["carrel_store_index_trainings_total"] > 0
    for times in "worker_index_search", "store_index_search", "store_gather", "worker_offload":
        assert values[f"carrel_{times}_seconds_count"] > 0
        assert values[f"carrel_{times}_seconds_sum"] > 0
    assert values["carrel_worker_selected_tokens_ratio_count"] > 0
    assert values["carrel_worker_fallbacks_total"] == 0
    calls = {
        (sample.labels["method"], sample.labels["code"])
        for sample in samples
        if sample.name == "carrel_store_calls_total"
    }
    assert {("Begin", "OK"), ("TopK", "OK"), ("End", "OK")} <= calls
    log = server.log.read_text()
    assert {json.loads(line)["process"] for line in log.splitlines()} >= {"carrel"}
    assert prompt[-40:] not in log


def check_indexes(server: Serving, ask: Callable[[], object], by_store: bool) -> None:
    """Check that trainers of low priority fit an index of each layer, and that rows are gathered by it."""
    assert [each.nice() for each in server.actors("TrainerActor")] == [max(os.nice(0), 15)]
    before = server.metrics()
    ask()
    after = server.metrics()
    trainings, gathered, store_searches, worker_searches = (after[name] - before[name] for name in COUNTED)
    assert trainings == LAYERS
    assert gathered > 0
    # over gRPC the worker has no index
    assert (store_searches > 0) == by_store
    assert worker_searches > 0
