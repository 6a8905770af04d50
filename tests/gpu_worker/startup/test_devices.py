"""Test the report of devices that `carrel doctor` asks for."""

from __future__ import annotations

import resource

import pytest
import torch

from gpu_worker.startup.devices import describe

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the limit of locked memory read 1 MiB, and not be raised."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 20, 1 << 20))


@pytest.mark.usefixtures("low_limit")
def test_a_cpu_locks_nothing() -> None:
    report = describe("cpu", "zero_copy", 1 << 30)
    assert (report.torch, report.cuda) == (torch.__version__, torch.version.cuda or "")
    assert (report.device, report.refusal, report.memlock) == ("cpu", "", "")


def test_a_device_that_is_not_there_is_refused_in_the_words_of_a_start() -> None:
    report = describe("cuda:63", "zero_copy", 1 << 30)
    assert report.device == ""
    assert "--device 'cuda:63': there are" in report.refusal


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize(("transport", "is_limited"), [("zero_copy", True), ("shm", False)])
def test_a_gpu_has_memory_and_locks_the_arena(transport: str, is_limited: bool) -> None:
    report = describe("auto", transport, 1 << 30)
    assert report.device == "cuda:0"
    assert 0 < report.gpus[0].free_bytes <= report.gpus[0].total_bytes
    assert report.memlock.startswith("the memlock limit is 1048576 bytes") is is_limited
