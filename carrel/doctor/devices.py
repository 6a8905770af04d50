"""Checks of the worker's device: PyTorch, driver, GPU memory, locked memory, and what Triton needs to compile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from carrel.doctor.finding import GIB, Finding, Start, State
from carrel.doctor.folders import check_folder
from carrel.doctor.programs import TIMEOUT_S, run_python
from carrel.machine import gpus
from carrel.process.device_report import DeviceReport, GPUMemory

MODULE = "gpu_worker.startup.devices"
_DRIVER_FIELDS = "name,driver_version"
# of a GPU: a worker plans with what it finds free, so that others' memory means fewer slots
MOST_TAKEN = 0.1


def check_devices(start: Start) -> Iterator[Finding]:
    """Check what PyTorch sees, from a process of its own."""
    options = start.options
    ended = run_python("-m", MODULE, options.device, options.transport, str(start.arena_bytes))
    if ended.code:
        state = State.WARNING if ended.timed_out else State.PROBLEM
        yield Finding(state, "torch", ended.error, "pip install -U 'carrel[gpu-worker]'")
        return
    report = DeviceReport.from_json(ended.output.splitlines()[-1])
    yield from judge(report, gpus(_DRIVER_FIELDS, TIMEOUT_S))
    if report.device.startswith("cuda"):
        yield check_compiler()
        yield check_folder("kernels", kernel_cache(start.home), State.PROBLEM, "set TRITON_CACHE_DIR")


def judge(report: DeviceReport, drivers: Sequence[str]) -> Iterator[Finding]:
    """Judge a report. drivers: name and version of each GPU that the NVIDIA driver lists."""
    build = f"{report.torch}, CUDA {report.cuda}" if report.cuda else f"{report.torch}, without CUDA"
    if report.refusal:
        remedy = "check nvidia-smi and the driver" if report.cuda else "install a CUDA build of torch"
        yield Finding(State.PROBLEM, "torch", f"{build}: {report.refusal}", remedy)
    elif drivers and not report.gpus:
        remedy = "update the driver" if report.cuda else "install a CUDA build of torch"
        text = f"{build}: it sees none of {len(drivers)} GPUs ({drivers[0]})"
        yield Finding(State.WARNING, "torch", f"{text}; the worker would compute on the CPU", remedy)
    else:
        yield Finding(State.OK, "torch", f"{build}: {report.device}")
    for index, gpu in enumerate(report.gpus):
        yield _memory(f"cuda:{index}", gpu)
    if report.memlock:
        # a privileged process may lock more than its limit says
        limit, _, remedy = report.memlock.partition(": ")
        yield Finding(State.WARNING, "locked memory", f"{limit}; CUDA may refuse to lock it", remedy)
    elif report.device.startswith("cuda"):
        yield Finding(State.OK, "locked memory", "the arena may be locked")


def check_compiler() -> Finding:
    """Check for the C compiler with which Triton builds the launchers of its kernels."""
    found = next(filter(None, map(shutil.which, filter(None, [os.environ.get("CC"), "gcc", "clang"]))), None)
    if found is None:
        return Finding(State.PROBLEM, "compiler", "no gcc or clang for Triton", "apt install gcc libc6-dev")
    return Finding(State.OK, "compiler", found)


def kernel_cache(home: Path) -> Path:
    """Return the folder where Triton keeps compiled kernels."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named) if named else Path(os.environ.get("TRITON_HOME") or home) / ".triton" / "cache"


def _memory(name: str, gpu: GPUMemory) -> Finding:
    text = f"{gpu.name}: {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB are free"
    if gpu.free_bytes >= (1 - MOST_TAKEN) * gpu.total_bytes:
        return Finding(State.OK, name, text)
    return Finding(State.WARNING, name, text, "nvidia-smi lists the processes that hold the rest: end them")
