"""Clocks: of one step after the other, and of a call so short that only many in a row can be timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.figures import KernelTime, Spread

WARM_UP_STEPS = 3
CPU_REPEATS = 7
# more than twice the L2 of an H200
COLD_BYTES = 128 << 20


def time_steps(
    step: Callable[[], object],
    num_steps: int,
    device: torch.device,
    before: Callable[[int], None] | None = None,
) -> Spread:
    """As `step_times`."""
    return Spread.of(step_times(step, num_steps, device, before))


def step_times(
    step: Callable[[], object],
    num_steps: int,
    device: torch.device,
    before: Callable[[int], None] | None = None,
) -> list[float]:
    """Milliseconds of each step after a warm-up. `before` prepares step i and is not timed.

    On a GPU the times are its own, between events, so that a step's launch hides behind the step before it.
    """
    is_cuda = device.type == "cuda"
    events, times = [], []
    for index in range(WARM_UP_STEPS + num_steps):
        if before is not None:
            before(index)
        if is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            events.append((begin, end))
        else:
            began = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - began))
    if is_cuda:
        torch.cuda.synchronize(device)
        times = [begin.elapsed_time(end) for begin, end in events]
    return times[WARM_UP_STEPS:]


def time_call(call: Callable[[], object], device: torch.device, rep_ms: int = 20) -> Spread:
    """Microseconds of one call: on a GPU means over CUDA graphs of many calls, without the host's share."""
    if device.type == "cuda":
        from triton.testing import do_bench_cudagraph

        return Spread.of(1e3 * sample for sample in do_bench_cudagraph(call, rep=rep_ms, return_mode="all"))
    call()
    times = []
    for _ in range(CPU_REPEATS):
        began = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - began))
    return Spread.of(times)


def time_blocking(call: Callable[[], object], repeats: int, device: torch.device) -> Spread:
    """Microseconds from the host's call to the device's end; for work in which the host has a part."""
    times = []
    for index in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        if index:
            times.append(1e6 * (time.perf_counter() - began))
    return Spread.of(times)


def kernel_times(step: Callable[[], object], device: torch.device) -> tuple[KernelTime, ...]:
    """The kernels of one step by name, the longest first; none on a CPU."""
    if device.type != "cuda":
        return ()
    from torch.profiler import ProfilerActivity, profile

    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize(device)
    kernels = [
        KernelTime(event.key[:120], event.count, event.self_device_time_total)
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    ]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.us))


def write_trace(step: Callable[[], object], device: torch.device, path: Path) -> None:
    """One step as a trace of what the host called and, on a GPU, what that ran."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds) as profiler:
        step()
        synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A call that is each of `calls` in turn, so that none finds what it reads in a cache."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
