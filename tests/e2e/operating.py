"""An operator's view of a real server: metrics of all three processes, and a log of objects without prompts."""

from __future__ import annotations

import json

import httpx
from prometheus_client.parser import text_string_to_metric_families
from serving import Serving
from waiting import PATIENCE


def check_operating(server: Serving, prompt: str) -> None:
    """After requests, of which one had this prompt, and some let the store select."""
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
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
