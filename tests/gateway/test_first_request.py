"""The gateway is ready when its worker has had a request of its own, which no client and no metric sees."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_worker import Script
from gateway_stack import Stack, running_stack
from waiting import PATIENCE, wait_until

from gateway import first_request


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("warm")
    options = {"api_keys": ("right-key", "other-key"), "max_concurrent": 2, "root_path": "/llm"}
    with running_stack(folder, model_dir, no_warmup=False, **options) as stack:
        yield stack


@pytest.fixture
def ready(warm: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=warm.url, timeout=PATIENCE) as client:
        yield client


def counted(http: httpx.Client) -> list[str]:
    """The gateway's own counts that are not zero."""
    text = http.get("/metrics", headers={"Authorization": "Bearer right-key"}).text
    others = ("#", "carrel_worker_", "carrel_store_", "carrel_build_info")
    own = [line for line in text.splitlines() if not line.startswith(others)]
    return [line for line in own if "_created" not in line and not line.endswith(" 0.0")]


def test_a_worker_has_one_request_of_one_token_before_anybody_is_served(
    warm: Stack, ready: httpx.Client
) -> None:
    for _ in range(2):
        assert ready.get("/ready").status_code == 200
    (request,) = warm.script.requests
    assert request.sampling.max_tokens == 1
    assert request.prompt_token_ids
    # nobody finds what it could leave
    assert request.cache_salt
    assert (request.session_id, request.prefix_salt) == ("", b"")
    assert counted(ready) == []


@pytest.mark.parametrize("fault", [{"fail_at": 0}, {"is_silent": True}], ids=lambda fault: next(iter(fault)))
def test_the_next_worker_has_its_own_and_a_failure_keeps_nobody_waiting(
    warm: Stack,
    ready: httpx.Client,
    fault: dict[str, int | bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(first_request, "LIMIT_S", 0.5)
    warm.script = Script(version="9.9.9")
    warm.service.status.forget()
    assert ready.get("/ready").status_code == 503
    warm.script = Script(**fault)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        wait_until(lambda: ready.get("/ready").status_code == 200)
    assert len(warm.script.requests) == 1
    assert counted(ready) == []
    assert [record.message for record in caplog.records if record.name.startswith("gateway")] == []


def test_no_warmup_sends_nothing(stack: Stack, http: httpx.Client) -> None:
    assert http.get("/ready").status_code == 200
    assert stack.script.requests == []
