"""Set up every test: one thread per process, kernels in Triton's interpreter where there is no GPU.

Tests that start real processes or use the GPU run one after the other.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest

# Before torch is imported, and inherited by every process that a test starts: many processes run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

# Triton reads it when it is imported, which any test module may do first through what it imports.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

MOST_PROCESSES = 16


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: one process per core, and one more for end-to-end tests, which wait for the processes they started."""
    return min(len(os.sched_getaffinity(0)) + 1, MOST_PROCESSES)


# before xdist reads the groups
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """End-to-end tests in one xdist group, unless they name their own, and those of the GPU in another: one process
    runs all of a group, so that no two share the cores or the device's memory."""
    for item in items:
        for mark in ("e2e", "gpu"):
            if item.get_closest_marker(mark) and not item.get_closest_marker("xdist_group"):
                item.add_marker(pytest.mark.xdist_group(mark))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze what thousands of collected tests hold, so that no garbage collection walks it.

    Neither while it grows nor later, where a benchmark that collects several times took seconds.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
