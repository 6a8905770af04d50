"""Ten thousand requests from the API's own document, by `make fuzz`: none is the server's fault, nothing grows.

`FUZZ_SEEDS=17-18 make fuzz` sends one again; `FUZZ_JSON=FILE` keeps what was seen."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fuzz_messages
import grpc
import httpx
import psutil
import pytest
from fuzz_cases import Cases
from fuzz_client import Judge, send
from serving import Serving, serving
from waiting import PATIENCE, wait_until

from benchmarks.about import about

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

SEEDS = range(*map(int, os.environ.get("FUZZ_SEEDS", "0-10000").split("-")))
# of them, how many are sent by chat gRPC too
SHARE_GRPC = 10
AT_ONCE, BLOCK = 4, 500
MIB = 1 << 20
# of a process's own memory, from the middle of the run to its end
MOST_GROWTH = 32 * MIB


def own_memory(server: Serving) -> dict[str, int]:
    """MiB of each process that no other shares."""
    found: Counter[str] = Counter()
    for process in server.descendants():
        try:
            modules = [part.partition(".")[0] for part in process.cmdline()]
            name = next((part for part in modules if part in ("gateway", "gpu_worker")), "kv_store")
            found[name] += process.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return {name: round(size / MIB) for name, size in sorted(found.items())}


def test_no_request_is_the_servers_fault_and_nothing_grows() -> None:
    machine = about((), "cpu")
    with serving("--log-level", "warning") as server:
        address = httpx.URL(server.url)
        document = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE).json()
        cases, judge = Cases(document, f"{address.host}:{address.port}"), Judge(document)
        processes = {name: server.child(name).pid for name in ("gateway", "gpu_worker")}
        statuses: dict[str, Counter[str]] = {}
        faults: list[dict[str, Any]] = []
        memory = [{"cases": 0, **own_memory(server)}]

        def ask(seed: int) -> None:
            case = cases.case(seed)
            outcome = send(case, address.host, address.port)
            statuses.setdefault(case.temper, Counter())[str(outcome.status)] += 1
            line = f"{case.method} {case.target[:80]} {case.body[:300]!r}"
            note(seed, line, judge.faults(case, outcome))
            if seed % SHARE_GRPC == 0:
                data = fuzz_messages.message(seed)
                status, found = fuzz_messages.send(channel, data)
                statuses.setdefault("chat gRPC", Counter())[status] += 1
                note(seed, repr(data[:300]), found)

        def note(seed: int, line: str, found: Iterable[str]) -> None:
            for fault in found:
                faults.append({"seed": seed, "request": line, "fault": fault})
                print(faults[-1], flush=True)

        with grpc.insecure_channel(server.grpc_target) as channel, ThreadPoolExecutor(AT_ONCE) as pool:
            for at in range(0, len(SEEDS), BLOCK):
                list(pool.map(ask, SEEDS[at : at + BLOCK]))
                memory.append({"cases": at + BLOCK, **own_memory(server)})
                print(memory[-1], flush=True)

        wait_until(lambda: server.worker_stats().running == 0 and httpx.get(f"{server.url}/ready").is_success)
        assert {name: server.child(name).pid for name in processes} == processes
        log = server.log.read_text()
    if file := os.environ.get("FUZZ_JSON"):
        keep(Path(file), machine, statuses, memory, faults)
    assert faults == []
    assert "Traceback" not in log, log[log.index("Traceback") - 2000 :][:6000]
    for name in ("gateway", "gpu_worker", "kv_store"):
        assert memory[-1][name] - memory[len(memory) // 2][name] <= MOST_GROWTH / MIB, (name, memory)


def keep(
    file: Path,
    machine: dict[str, Any],
    statuses: dict[str, Counter[str]],
    memory: list[dict[str, int]],
    faults: list[dict[str, Any]],
) -> None:
    told = {temper: dict(sorted(counts.items())) for temper, counts in sorted(statuses.items())}
    result = {
        "benchmark": "fuzz",
        "about": {**machine, "command": "make fuzz"},
        "shapes": {"seeds": [SEEDS.start, SEEDS.stop], "at_once": AT_ONCE, "model": "carrel-nano"},
        "rows": [{"statuses": told, "memory_mib": memory, "faults": faults}],
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
