"""The banner: what is known is shown, what is secret is not."""

from __future__ import annotations

import json
import shlex
from io import StringIO
from pathlib import Path

from rich.console import Console

from carrel.process.settings import resolve
from carrel.serve.banner import Facts, banner, curl, gather_facts, ready_lines
from carrel.serve.children import served_name
from carrel.serve.endpoints import Endpoints
from carrel.serve.options import ServeOptions
from gpu_worker.v1 import gpu_worker_pb2
from kv_store.v1 import kv_store_pb2

WORKER = gpu_worker_pb2.GetInfoResponse(
    model="/models/carrel-nano",
    model_type="llama",
    device="cpu",
    dtype="float32",
    max_model_len=32768,
    max_num_seqs=8,
    default_policy="pqcache",
    default_budget=gpu_worker_pb2.Budget(share=0.1),
    num_parameters=15_700_000,
    slot_capacity_tokens=4 * 32768 + 5,
    context_capacity=7,
    transport="shm",
)


def rendered(facts: Facts, needs_key: bool = False) -> str:
    given = {"--api-key": "tell-nobody", "--hot-cache": "0.25"}
    shown = resolve(ServeOptions, {"command line": given}).shown()
    console = Console(file=StringIO(), width=140)
    console.print(banner(facts, shown, "9.9", "abc1234"))
    lines = ready_lines(facts, Endpoints(Path("/run"), "0.0.0.0", 8000, 8001), needs_key)
    return "\n".join([console.file.getvalue(), *lines])  # type: ignore[attr-defined]


def test_all_that_is_known_is_shown() -> None:
    store = kv_store_pb2.StatsResponse(arena_bytes=2**31)
    text = rendered(Facts("carrel-nano", WORKER, store))
    for part in (
        "carrel 9.9 (abc1234)",
        "carrel-nano (llama, 15.7 M parameters)",
        "cpu, float32",
        "32,768 tokens, 8 requests",
        "pqcache, budget 0.1 of the context",
        "2.00 GiB of host memory (shm)",
        "of 32,768 tokens: 4 wholly on the device, 7 with the arena",
        "hot-cache = 0.25 (command line)",
        "ready  http://127.0.0.1:8000 (the page)   docs http://127.0.0.1:8000/docs   API http://127.0.0.1:8000/v1",
        "0.0.0.0:8001",
    ):
        assert part in text, part


def test_what_is_not_known_is_left_out() -> None:
    text = rendered(Facts())
    assert "ready" in text
    assert "max concurrency" not in text
    assert "options" in text


def test_no_key_is_shown() -> None:
    text = rendered(Facts(), needs_key=True)
    assert "tell-nobody" not in text
    assert "$CARREL_API_KEY" in text


def test_the_request_can_be_pasted() -> None:
    endpoints = Endpoints(Path("/run"), "::1", 8000, 8001)
    words = shlex.split(curl("it's a model", endpoints, needs_key=False).replace("\\\n", ""))
    assert words[:2] == ["curl", "http://[::1]:8000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's a model"
    # a document, a blank line and a question: the form that the bundled model knows
    document, question = body["messages"][0]["content"].split("\n\n")
    assert "amber fox is 48213" in document
    assert "amber fox" in question


def test_the_model_has_its_name_of_the_api(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert served_name(str(tmp_path / "tiny"), {}) == "tiny"
    assert served_name("owner/name", {"served_model_names": "first,second"}) == "first"


def test_processes_that_do_not_answer_leave_the_banner_empty(tmp_path: Path) -> None:
    # no socket is there
    assert gather_facts(Endpoints(tmp_path, "127.0.0.1", 1, 1), "tiny") == Facts("tiny")


def test_no_page_is_named_that_is_not_there() -> None:
    endpoints = Endpoints(Path("/run"), "127.0.0.1", 8000, 0)
    assert (
        ready_lines(Facts(), endpoints, needs_key=False, has_page=False)[0]
        == "ready  http://127.0.0.1:8000/v1"
    )


def test_a_unix_socket_is_said_and_pasted() -> None:
    endpoints = Endpoints(Path("/run"), "127.0.0.1", 0, 0, Path("/run/http.sock"))
    where, request = ready_lines(Facts(), endpoints, needs_key=False)
    assert where == "ready  unix:/run/http.sock"
    assert request.startswith("curl --unix-socket /run/http.sock http://localhost/v1/chat/completions")
    with_tls = Endpoints(Path("/run"), "127.0.0.1", 8443, 0, has_tls=True)
    assert ready_lines(Facts(), with_tls, needs_key=False)[0].startswith("ready  https://127.0.0.1:8443")
