"""`python -m gpu_worker.startup.devices DEVICE TRANSPORT ARENA_BYTES`: prints a DeviceReport, for `carrel doctor`."""

from __future__ import annotations

import sys

import torch

from carrel.process.device_report import DeviceReport, GPUMemory
from gpu_worker.config import find_device
from gpu_worker.errors import ConfigError
from gpu_worker.store.host_registration import allow_locking, too_low


def describe(asked: str, transport: str, arena_bytes: int) -> DeviceReport:
    """Describe the devices of a worker with these options, and whether CUDA may lock its arena."""
    device = refusal = memlock = ""
    try:
        device = find_device(asked)
    except ConfigError as error:
        refusal = str(error)
    if device.startswith("cuda") and transport == "zero_copy":
        allow_locking(arena_bytes)
        memlock = too_low(arena_bytes) or ""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = tuple(
        GPUMemory(torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index))
        for index in range(count)
    )
    return DeviceReport(torch.__version__, torch.version.cuda or "", device, gpus, refusal, memlock)


def main() -> int:
    asked, transport, arena_bytes = sys.argv[1:]
    print(describe(asked, transport, int(arena_bytes)).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
