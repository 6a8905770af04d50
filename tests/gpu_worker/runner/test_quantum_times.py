"""Times of quanta, read once the device is past them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from gpu_worker.device import Mark
from gpu_worker.records.plans import Measured, WorkKind
from gpu_worker.runner import quantum_times
from gpu_worker.runner.quantum_times import QuantumTimes


@dataclass
class Device:
    """Its time, and how far it has come."""

    now: float = 0.0
    done: float = 0.0
    waited: list[float] = field(default_factory=list)

    def mark(self, _device: torch.device) -> Mark:
        return FakeMark(self, self.now)


class FakeMark(Mark):
    def __init__(self, device: Device, at: float) -> None:
        self.device, self.at = device, at

    @property
    def is_reached(self) -> bool:
        return self.device.done >= self.at

    def wait(self) -> None:
        if not self.is_reached:
            self.device.waited.append(self.at)
            self.device.done = self.at

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, FakeMark)
        return self.at - earlier.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(quantum_times, "Mark", made.mark)
    return made


def run(times: QuantumTimes, device: Device, seconds: float) -> None:
    """Queue a quantum that takes so long."""
    begun = times.begin()
    device.now += seconds
    times.end(begun, 1e9, WorkKind.LONG)


def test_the_device_has_at_most_one_iteration_of_prompts_before_it(device: Device) -> None:
    times = QuantumTimes(torch.device("cpu"))
    for _ in range(4):
        run(times, device, 0.02)
        times.settle()
    assert device.waited == pytest.approx([0.02, 0.04, 0.06])


def test_quanta_of_an_iteration_follow_one_another_and_are_measured_when_they_are_done(
    device: Device,
) -> None:
    times = QuantumTimes(torch.device("cpu"))
    run(times, device, 0.25)
    run(times, device, 0.5)
    assert times.settle() == []
    # Between iterations other work may run.
    device.now += 4.0
    run(times, device, 1.0)
    device.done = device.now
    found = times.settle()
    assert found == [Measured(1e9, WorkKind.LONG, seconds) for seconds in (0.25, 0.5, 1.0)]
    assert times.settle() == []
