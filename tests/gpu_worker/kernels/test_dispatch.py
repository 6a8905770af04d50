"""Which implementation is called, and that a CPU needs no Triton."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from gpu_worker.kernels.dispatch import by_device

KERNEL = "a_kernel_of_this_test"


@dataclass(frozen=True)
class OnDevice:
    """Stands for a tensor, or for a record of tensors."""

    device: torch.device


def double(first: OnDevice, factor: int = 2) -> tuple[str, int]:
    """Return twice the tensor."""
    return "reference", factor


def test_the_reference_runs_where_the_first_argument_is_on_the_cpu() -> None:
    chosen = by_device(double, "no_such_module")
    assert chosen(OnDevice(torch.device("cpu"))) == ("reference", 2)
    assert chosen(OnDevice(torch.device("cpu")), factor=5) == ("reference", 5)


def test_the_kernel_runs_elsewhere_and_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ModuleType(KERNEL)
    kernel.double = lambda first, factor=2: ("kernel", factor)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, KERNEL, kernel)
    chosen = by_device(double, KERNEL)
    on_gpu = OnDevice(torch.device("cuda:1"))
    assert chosen(on_gpu, factor=3) == ("kernel", 3)
    monkeypatch.delitem(sys.modules, KERNEL)
    assert chosen(on_gpu) == ("kernel", 2)
    assert chosen(OnDevice(torch.device("cpu"))) == ("reference", 2)


def test_a_missing_kernel_is_said_when_it_is_called() -> None:
    chosen = by_device(double, "no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        chosen(OnDevice(torch.device("cuda")))


def test_what_is_chosen_says_what_the_reference_says() -> None:
    chosen = by_device(double, "no_such_module")
    assert (chosen.__name__, chosen.__doc__) == ("double", "Return twice the tensor.")


def test_importing_every_op_loads_no_triton() -> None:
    program = (
        "import pkgutil, importlib, sys, gpu_worker\n"
        "for room in pkgutil.walk_packages(gpu_worker.__path__, 'gpu_worker.'):\n"
        "    if room.ispkg: importlib.import_module(room.name)\n"
        "import gpu_worker.startup.build\n"
        "print(any(name.startswith('gpu_worker') and name.endswith('kernel') for name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
