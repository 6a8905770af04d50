"""Test how reports of devices are judged, those of machines with GPUs included."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrel.doctor.devices import check_compiler, judge, kernel_cache
from carrel.doctor.finding import GIB, State
from carrel.process.device_report import DeviceReport, GPUMemory

DRIVER = "NVIDIA H100, 550.1"
IDLE = GPUMemory("NVIDIA H100", 79 * GIB, 80 * GIB)
TAKEN = GPUMemory("NVIDIA H100", 30 * GIB, 80 * GIB)
LIMIT = "the memlock limit is 1 bytes, the arena has 2: raise it (`ulimits: {memlock: -1}`)"
CPU = DeviceReport("2.13.0+cpu", "", "cpu")
CUDA = DeviceReport("2.13.0", "13.0", "cuda:0", (IDLE,))


@pytest.mark.parametrize(
    ("report", "drivers", "expected"),
    [
        (CPU, [], {"torch": ("ok", "")}),
        (CPU, [DRIVER], {"torch": ("warning", "install a CUDA build of torch")}),
        (DeviceReport("2.13.0", "13.0", "cpu"), [DRIVER], {"torch": ("warning", "update the driver")}),
        (
            DeviceReport("2.13.0", "13.0", "", refusal="--device 'cuda': there are 0 CUDA devices"),
            [],
            {"torch": ("problem", "check nvidia-smi and the driver")},
        ),
        (CUDA, [DRIVER], {"torch": ("ok", ""), "cuda:0": ("ok", ""), "locked memory": ("ok", "")}),
        (
            DeviceReport("2.13.0", "13.0", "cuda:0", (IDLE, TAKEN), memlock=LIMIT),
            [DRIVER],
            {
                "torch": ("ok", ""),
                "cuda:0": ("ok", ""),
                "cuda:1": ("warning", "nvidia-smi lists the processes that hold the rest: end them"),
                "locked memory": ("warning", "raise it (`ulimits: {memlock: -1}`)"),
            },
        ),
    ],
)
def test_a_report_is_judged(
    report: DeviceReport, drivers: list[str], expected: dict[str, tuple[str, str]]
) -> None:
    assert {each.subject: (each.state.value, each.remedy) for each in judge(report, drivers)} == expected


def test_a_report_is_read_as_it_was_written() -> None:
    assert DeviceReport.from_json(CUDA.to_json()) == CUDA


def test_triton_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert check_compiler().state is State.PROBLEM
    (tmp_path / "gcc").touch(mode=0o755)
    assert check_compiler().text == str(tmp_path / "gcc")


def test_the_cache_of_kernels_is_where_triton_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    assert kernel_cache(tmp_path) == tmp_path / ".triton" / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache/triton")
    assert kernel_cache(tmp_path) == Path("/cache/triton")
