"""The sizes on the deployment page are those that the worker's memory plan gives, to within a twentieth."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkout import ROOT

from benchmarks.shapes import SHAPES, ModelShape
from gpu_worker.caches.layer_map import LayerMap
from gpu_worker.config import WorkerConfig
from gpu_worker.models import ModelConfig
from gpu_worker.models.read_config import read_config
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.registry import registry
from gpu_worker.records import IndexDevice
from gpu_worker.row_format import row_format
from gpu_worker.runner.workload import Workload
from gpu_worker.startup import memory
from kv_store.client import RowFormat

PAGE = ROOT / "docs/deployment.md"
GIB = 2**30
DEFAULTS = WorkerConfig(model="m", listen="unix:/a", store="unix:/b")
NAMES = {"Llama-3.1-8B": "llama-3.1-8b", "carrel-nano": "nano"}


def model_config(shape: ModelShape) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config_fields(shape.max_len)))
        return read_config(Path(folder))


@dataclass(frozen=True)
class Sizes:
    """Bytes of a worker in bf16 with the default options: so many requests at once, prompt and answer so long."""

    shape: ModelShape
    context: int
    users: int

    @property
    def host(self) -> int:
        """All rows in the arena."""
        return self.users * self.shape.kv_bytes(self.context, self._row_format.row_bytes)

    @property
    def beside(self) -> int:
        """On the device beside weights and slots."""
        workload = self._workload
        parts = (memory.seat_bytes(workload), memory.prefill_bytes(workload), memory.decode_bytes(workload))
        return sum(parts) + memory.CONTEXT_BYTES

    @property
    def least(self) -> int:
        """Device memory with every hot cache as small as it may be."""
        return self.weights + self.beside + self.users * memory.least_slot_bytes(self._workload)

    @property
    def resident(self) -> int:
        """Device memory with every token in a slot."""
        return self.weights + self.beside + self.host + self.users * memory.state_bytes(self._workload)

    @property
    def weights(self) -> int:
        return 2 * self.shape.num_weights

    @property
    def _row_format(self) -> RowFormat:
        return row_format(self.shape.head_dim, torch.bfloat16)

    @property
    def _workload(self) -> Workload:
        shape = self.shape
        group_size = shape.num_heads // shape.num_kv_heads
        cache = CacheShape(
            self.users,
            shape.num_layers,
            shape.num_kv_heads,
            group_size,
            self._row_format,
            self.context,
            shape.head_dim**-0.5,
            torch.device("meta"),
            dtype=torch.bfloat16,
        )
        return Workload(
            model_config(shape),
            cache,
            torch.bfloat16,
            registry(),
            DEFAULTS.default_policy,
            DEFAULTS.budget,
            DEFAULTS.prefill_chunk,
            LayerMap.with_full(shape.num_layers, DEFAULTS.full_layers),
            index_device=IndexDevice.AUTO,
        )


def rows_of(page: str) -> list[list[str]]:
    """Cells of the table whose first column is a model."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in lines if cells[0] in NAMES]


def tokens(text: str) -> int:
    found = re.fullmatch(r"(\d+)K", text)
    assert found
    return 1024 * int(found[1])


@pytest.mark.parametrize("cells", rows_of(PAGE.read_text()), ids=" ".join)
def test_sizes_are_those_of_the_memory_plan(cells: list[str]) -> None:
    name, context, users, *written = cells
    sizes = Sizes(SHAPES[NAMES[name]], tokens(context), int(users))
    computed = [sizes.host, sizes.weights, sizes.beside, sizes.least, sizes.resident]
    in_gib = [value / GIB for value in computed]
    row = " | ".join([name, context, users, *(f"{value:.1f}" for value in in_gib)])
    assert [float(value) for value in written] == pytest.approx(in_gib, rel=0.05, abs=0.06), f"| {row} |"


def test_both_models_are_there() -> None:
    assert {cells[0] for cells in rows_of(PAGE.read_text())} == set(NAMES)
