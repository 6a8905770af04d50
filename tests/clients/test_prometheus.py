"""Prometheus, with the file of deploy/monitoring, reads a real server and is asked all that the board asks; `make
test-clients`, where Prometheus is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from serving import ROOT, Serving, serving
from waiting import PATIENCE, wait_until

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
MONITORING = ROOT / "deploy" / "monitoring"
KEY = "sk-behind-prometheus"
HEADERS = {"Authorization": f"Bearer {KEY}"}
POLICIES = ("full", "bitkeys", "pqcache", "clusterkv", "snapkv")
# what Grafana puts there, of a source whose `timeInterval` is 5 s: four times that
RATE_INTERVAL = "20s"
# of what nothing is told while nothing fails, and on a CPU, which copies nothing to a device and whose worker selects
# and gathers itself
EMPTY_HERE = {("Calls that failed", "A"), *(("Search, gather and copy, p99", letter) for letter in "CDE")}
ROUNDS = 10

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(None in (PROMETHEUS, PROMTOOL), reason="Prometheus is not installed"),
]


def queries() -> dict[tuple[str, str], str]:
    """By panel and letter, as Grafana sends them."""
    board = json.loads((MONITORING / "boards" / "carrel.json").read_text())
    return {
        (panel["title"], target["refId"]): target["expr"]
        .replace("$model", "carrel-nano")
        .replace("$__rate_interval", RATE_INTERVAL)
        for panel in board["panels"]
        for target in panel.get("targets", [])
    }


@contextmanager
def reading(folder: Path, server: Serving) -> Iterator[httpx.Client]:
    """A client of the Prometheus that reads this server."""
    text = (MONITORING / "prometheus.yml").read_text()
    for told, here in {
        "gateway:8000": server.url.removeprefix("http://"),
        "/tmp/carrel-key": str(folder / "key"),
    }.items():
        assert told in text
        text = text.replace(told, here)
    (folder / "key").write_text(KEY)
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(MONITORING / "alerts.yml", folder)
    checked = subprocess.run(
        [PROMTOOL, "check", "config", folder / "prometheus.yml"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
    port = free_port()
    command = [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE) as client:
            wait_until(lambda: is_read(client), lambda: (folder / "log").read_text()[-3000:], poll=0.5)
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE)


def is_read(client: httpx.Client) -> bool:
    try:
        [target] = client.get("/api/v1/targets").json()["data"]["activeTargets"]
    except (httpx.TransportError, ValueError, KeyError):
        return False
    assert target["lastError"] == ""
    return target["health"] == "up"


def use(server: Serving, number: int) -> None:
    """A document for each policy, asked about twice in a session; and who is refused."""
    words = next((ROOT / "examples" / "documents").glob("*.txt")).read_text().split()
    document = " ".join(words[number * 900 : number * 900 + 900])
    with httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE) as client:
        for policy in POLICIES:
            for question in ("Who is it?", "Where is it?"):
                asked = {
                    "messages": [{"role": "user", "content": f"{policy} {document}\n\n{question}"}],
                    "max_tokens": 16,
                    "session_id": f"{policy}-{number}",
                    "carrel": {"policy": policy, "budget": 0.1},
                }
                client.post("/v1/chat/completions", json=asked, headers=HEADERS).raise_for_status()
        assert client.post("/v1/chat/completions", json=asked).status_code == 401
        assert client.get("/v1/models/another", headers=HEADERS).status_code == 404


def samples(client: httpx.Client, expression: str) -> list[float]:
    """Return the values of the last minute, queried as a graph queries them."""
    now = time.time()
    asked: dict[str, Any] = {"query": expression, "start": now - 60, "end": now, "step": 5}
    answer = client.get("/api/v1/query_range", params=asked).json()
    assert answer["status"] == "success", (expression, answer)
    return [float(value) for series in answer["data"]["result"] for _, value in series["values"]]


def test_every_query_of_the_board_gives_data(tmp_path: Path) -> None:
    # slabs so small that these documents fill some, and are found again; an arena that is soon full, and a disk
    small = ["--slab-bytes", "64KiB", "--kv-store-path", str(tmp_path / "kv")]
    with serving("--api-key", KEY, *small, arena="64MiB") as server, reading(tmp_path, server) as client:
        found: dict[tuple[str, str], list[float]] = {}
        for number in range(ROUNDS):
            use(server, number)
            for name, expression in queries().items():
                # NaN is a quantile, or a share, of nothing
                found.setdefault(name, []).extend(
                    value for value in samples(client, expression) if value == value
                )
            missing = {name for name, values in found.items() if not values}
            if missing <= EMPTY_HERE:
                break
        named = client.get("/api/v1/label/model_name/values", params={"match[]": "carrel_build_info"}).json()
        print(f"{len(found)} queries, no data: {sorted(missing)}, after {number + 1} rounds")
    assert missing <= EMPTY_HERE
    assert named["data"] == ["carrel-nano"]
    assert found["Store reachable", "A"][-1] == 1
    assert 0 < max(found["What was there already", "A"]) < 1


def test_each_alert_is_raised_by_its_fault_and_by_no_load_that_passes(tmp_path: Path) -> None:
    for file in (MONITORING / "alerts.yml", Path(__file__).with_name("alerts.test.yml")):
        shutil.copy(file, tmp_path)
    command = [PROMTOOL, "test", "rules", "alerts.test.yml"]
    tested = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr
