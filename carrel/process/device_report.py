"""The report of the devices that a worker would compute on, by `python -m gpu_worker.startup.devices`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class GPUMemory:
    """A CUDA device; free_bytes: what other processes leave of total_bytes."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class DeviceReport:
    """torch: its version. cuda: the version that it was built for, empty for a CPU build.

    device: `cpu` or `cuda:INDEX`; empty with a refusal, which says why there is none as asked for.
    memlock: a limit below the arena's size, with its remedy; empty for a sufficient one.
    """

    torch: str
    cuda: str
    device: str
    gpus: tuple[GPUMemory, ...] = ()
    refusal: str = ""
    memlock: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> DeviceReport:
        """Read what `to_json` wrote. Raises ValueError or TypeError for another text."""
        fields = json.loads(line)
        return cls(**{**fields, "gpus": tuple(GPUMemory(**each) for each in fields["gpus"])})
