"""One operation on operands of one size: what is called, what it must move, and what it is measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.commands.options import Workload
from benchmarks.figures import Spread
from benchmarks.shapes import ModelShape
from benchmarks.timing import COLD_BYTES, in_turn, time_call
from benchmarks.traces import overlap
from gpu_worker.row_format import row_format
from kv_store.client import RowFormat

MAX_COPIES = 64


@dataclass(frozen=True)
class Setting:
    """Model, workloads and budget that cases are made for. budget_tokens: selected per KV head."""

    shape: ModelShape
    workloads: tuple[Workload, ...]
    budget_tokens: int
    device: torch.device
    dtype: torch.dtype

    def empty(self, *size: int) -> Tensor:
        return torch.empty(size, device=self.device, dtype=self.dtype)

    def normal(self, *size: int) -> Tensor:
        return self.empty(*size).normal_()

    def implementation(self, op: str, name: str, module: str = "kernel") -> Callable[..., Any]:
        """The kernel where there is a GPU, else the reference; never one in place of the other. op: its package in
        gpu_worker, such as "kernels.top_k"."""
        return load(op, name, module if self.device.type == "cuda" else "reference")

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def heads(self) -> int:
        return self.shape.num_kv_heads

    @property
    def dim(self) -> int:
        return self.shape.head_dim

    @property
    def row_format(self) -> RowFormat:
        return row_format(self.dim, self.dtype)

    @property
    def row_bytes(self) -> int:
        return self.row_format.row_bytes

    def ints(self, value: int, *size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(size, value, dtype=dtype, device=self.device)

    def seats(self, batch: int) -> Tensor:
        return torch.arange(batch, device=self.device)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, device=self.device)

    def floats(self, *size: int) -> Tensor:
        """Normal in float32, whatever the model's type."""
        return torch.randn(size, device=self.device)


def load(op: str, name: str, module: str = "reference") -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module(f"gpu_worker.{op}.{module}"), name)
    return found


@dataclass(frozen=True)
class Operands:
    """Calls on operands that lie on the device. error: how far `call` is off the reference; see `relative_error`."""

    call: Callable[[], object]
    rival: Callable[[], object] | None = None
    error: Callable[[], float] | None = None


@dataclass(frozen=True)
class KernelCase:
    """An operation at one size. num_bytes: the least that must be read and written in the device's memory.

    make: fresh operands, other ones at every call. rival: what the operands' rival is called. is_from_host: the bytes
    are read from host memory, or written there.
    """

    op: str
    label: str
    num_bytes: int
    make: Callable[[], Operands]
    rival: str | None = None
    is_from_host: bool = False


@dataclass(frozen=True)
class Ceilings:
    """Speeds of plain copies: within the device's memory (bytes read and written), and to it from the host."""

    tb_per_s: float
    from_host_tb_per_s: float


@dataclass(frozen=True)
class KernelRow:
    """A measured case. ceiling_share: of the bytes a second that a plain copy reached in the same run; for what comes
    from host memory, a copy from there.

    rival_ratio: the rival's time to ours. error: relative, against the reference; None where it was not checked.
    """

    op: str
    label: str
    num_bytes: int
    us: Spread
    tb_per_s: float
    ceiling_share: float
    rival: str | None
    rival_us: Spread | None
    rival_ratio: float | None
    error: float | None


def measure(case: KernelCase, device: torch.device, ceilings: Ceilings, is_warm: bool) -> KernelRow:
    """is_warm: the same operands in every call, from the L2 cache where they fit; else many in turn."""
    copies = 1 if is_warm else max(1, min(MAX_COPIES, -(-COLD_BYTES // case.num_bytes)))
    if device.type != "cuda":
        copies = 1
    operands = [case.make() for _ in range(copies)]
    error = operands[0].error() if operands[0].error is not None else None
    us = time_call(in_turn([each.call for each in operands]), device)
    rivals = [each.rival for each in operands if each.rival is not None]
    rival_us = time_call(in_turn(rivals), device) if rivals else None
    speed = case.num_bytes / us.median / 1e6
    return KernelRow(
        case.op,
        case.label,
        case.num_bytes,
        us,
        speed,
        speed / (ceilings.from_host_tb_per_s if case.is_from_host else ceilings.tb_per_s),
        case.rival,
        rival_us,
        rival_us.median / us.median if rival_us is not None else None,
        error,
    )


def copy_ceilings(device: torch.device) -> Ceilings:
    is_cuda = device.type == "cuda"
    num_bytes = 4 << 30 if is_cuda else 16 << 20
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    within = time_call(lambda: target.copy_(source), device)
    part = target[: 256 << 20]
    host = torch.ones(part.shape, dtype=torch.uint8, pin_memory=is_cuda)
    across = time_call(lambda: part.copy_(host, non_blocking=True), device)
    return Ceilings(2 * num_bytes / within.median / 1e6, part.numel() / across.median / 1e6)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference to the norm of the reference; where both are infinite there is none."""
    found, wanted = found.double(), wanted.double()
    same = found == wanted
    difference = (found - wanted).masked_fill(same, 0.0)
    return float(difference.norm() / wanted.masked_fill(wanted.isinf(), 0.0).norm().clamp(min=1e-30))


def mismatch(found: Tensor, wanted: Tensor) -> float:
    """Share of entries that differ; of indices."""
    return float((found != wanted).double().mean())


def missed(found: Tensor, wanted: Tensor) -> float:
    """Share of the selected positions that the other does not have; both ascending."""
    return 1 - overlap(wanted, found)


def tokens(setting: Setting, chunk: int = 8192) -> Sequence[int]:
    """Tokens of a step at every batch, and of a prefill chunk."""
    return sorted({*batches(setting), min(chunk, setting.shape.max_len)})


def batches(setting: Setting) -> Sequence[int]:
    return sorted({workload.batch for workload in setting.workloads})


def contexts(setting: Setting) -> Sequence[int]:
    """Each length once, for what is done with one prompt at a time."""
    return sorted({workload.context for workload in setting.workloads})


def workloads(setting: Setting) -> Sequence[Workload]:
    return setting.workloads
