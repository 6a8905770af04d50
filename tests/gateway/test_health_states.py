"""Test the answers of /health and /ready in each state of a server, as docs/reliability.md has them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.admission import Admission
from gateway.errors import VersionMismatch, WorkerUnavailable
from gateway.rest.errors import error_response
from gateway.worker_status import WorkerStatus
from gpu_worker.v1 import gpu_worker_pb2 as pb

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
ROW = re.compile(r"^\| (.+?) \| (\d{3}) \| (\d{3})(?: `(\w+)`)? \|$", re.MULTILINE)


@dataclass
class Worker:
    """As the gateway finds it. Also the rehearsal: the first request to a worker."""

    answers: bool = True
    serves: bool = True
    is_ours: bool = True
    store_reachable: bool = True
    is_rehearsed: bool = True

    async def is_serving(self) -> bool:
        if not self.answers:
            raise WorkerUnavailable()
        return self.serves

    async def info(self) -> pb.GetInfoResponse:
        if not self.is_ours:
            raise VersionMismatch("The model worker is of another version.")
        return pb.GetInfoResponse()

    async def stats(self) -> pb.StatsResponse:
        return pb.StatsResponse(store_reachable=self.store_reachable)

    async def has_ended(self) -> bool:
        return self.is_rehearsed

    def forget(self) -> None:
        pass


STATES = {
    "all serve": Worker(),
    "the worker loads, warms up or drains": Worker(serves=False),
    "its first request is not answered yet": Worker(is_rehearsed=False),
    "the worker is away, or hangs": Worker(answers=False),
    "the worker is of another version": Worker(is_ours=False),
    "the store is away, or hangs": Worker(store_reachable=False),
    "the gateway drains": Worker(),
}


@pytest.mark.parametrize(("state", "health", "ready", "code"), ROW.findall(PAGE.read_text(encoding="utf-8")))
async def test_a_state_is_told_as_the_page_has_it(state: str, health: str, ready: str, code: str) -> None:
    worker, admission = STATES[state], Admission(1)
    admission.is_draining = state == "the gateway drains"
    status = WorkerStatus(worker, admission, worker)  # type: ignore[arg-type]
    assert await status.is_alive() == (health == "200")
    error = await status.why_not_ready()
    if error is None:
        assert (ready, code) == ("200", "")
        return
    answer = error_response(error)
    assert (str(answer.status_code), json.loads(bytes(answer.body))["error"]["code"]) == (ready, code)


def test_the_page_has_every_state() -> None:
    assert [row[0] for row in ROW.findall(PAGE.read_text(encoding="utf-8"))] == list(STATES)
