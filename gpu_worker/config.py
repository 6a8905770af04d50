"""The worker's options. Reading them needs pydantic-settings; making a record, as benchmarks do, needs no library."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from carrel.process.logs import LogOptions
from carrel.process.options import REQUIRED, auto_or_bytes, json_object, num_tokens, option, share_or_tokens
from carrel.process.tracing import TraceOptions
from gpu_worker.errors import ConfigError
from gpu_worker.neighbours import NeighbourOptions
from gpu_worker.records import HotCacheSize
from gpu_worker.selection import SelectionOptions

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LEAST_HANG_TIMEOUT_S = 2.0
LEAST_MEMORY_BYTES = 2**20
MOST_MEMORY_BYTES = 2**50


def read_hot_cache(text: str) -> HotCacheSize:
    """From `auto`, a share in (0, 1] of the context, or a number of tokens. Raises ValueError."""
    if text.strip().lower() == "auto":
        return HotCacheSize()
    try:
        return HotCacheSize(*share_or_tokens(text))
    except ValueError as exc:
        raise ValueError(f"{exc}, or auto") from exc


def read_memory_limit(text: str) -> int | float | None:
    """Read a number of bytes, a share in (0, 1] of the device's memory, or None for `auto`. Raises ValueError."""
    with contextlib.suppress(ValueError):
        if 0 < (share := float(text)) <= 1:
            return share
    try:
        limit = auto_or_bytes(text)
    except ValueError as exc:
        raise ValueError(f"{exc}, a share in (0, 1], or auto") from exc
    if limit is not None and not LEAST_MEMORY_BYTES <= limit <= MOST_MEMORY_BYTES:
        raise ValueError("must be a size from 1MiB to 1024TiB, a share in (0, 1], or auto")
    return limit


# as vLLM's users write them
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def config_overrides(text: str) -> dict[str, object]:
    """Read fields of config.json; settings of RoPE alone are the value of one. Raises ValueError."""
    values = json_object(text)
    return {"rope_scaling": values} if {"rope_type", "type"} & values.keys() else values


def device_name(text: str) -> str:
    """Raises ValueError for what is no device's name."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", text):
        raise ValueError("must be auto, cpu, cuda or cuda:INDEX")
    return text


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(SelectionOptions):
    """The worker's computation and its memory."""

    device: str = option("auto", "auto, cpu, cuda or cuda:INDEX", parse=device_name, metavar="DEVICE")
    dtype: Dtype = option(
        "auto",
        "float32 or float, bfloat16, float16 or half, or auto: the checkpoint's own on a GPU, float32 on a CPU; where "
        "that has AMX or AVX512-BF16, bfloat16 computes prompts faster",
        parse=lambda text: _DTYPE_ALIASES.get(text, text),
        metavar="TYPE",
    )
    quantization: Literal["auto", "fp8"] = option(
        "auto",
        "fp8: quantise the matrices of plain weights to 8 bits while they are read; auto: as they are stored",
        metavar="NAME",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = option(
        "auto", "auto, safetensors, or dummy: random weights", metavar="NAME"
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id", metavar="NAME")
    threads: int | None = option(
        None, "CPU threads of the worker (default: all its cores)", metavar="N", ge=1, le=4096
    )
    max_model_len: int | None = option(
        None,
        "longest prompt and answer together, in tokens, such as 131072 or 128K (default: the model's)",
        parse=num_tokens,
        metavar="N",
        ge=2,
        le=2**24,
    )
    hf_overrides: dict[str, object] | None = option(
        None,
        "fields of config.json with other values, or settings of RoPE with a rope_type, as a JSON object",
        also=("rope-scaling",),
        parse=config_overrides,
        metavar="JSON",
    )
    max_num_seqs: int | None = option(
        None,
        "requests decoded at once (default: 8 on a CPU, up to 256 on a GPU, as memory allows)",
        metavar="N",
        ge=1,
        le=4096,
    )
    max_queue: int = option(
        256, "requests that may wait in the worker; more get 503", metavar="N", ge=0, le=2**20
    )
    prefill_chunk: int = option(
        2048,
        "tokens of a prompt computed at once",
        also=("max-num-batched-tokens",),
        metavar="N",
        ge=1,
        le=2**20,
    )
    itl_target_ms: int | None = option(
        None,
        "time between a stream's tokens while prompts are computed (default: 25 ms, or 2.5 decode steps if that is "
        "longer)",
        metavar="MS",
        ge=1,
        le=60_000,
    )
    enforce_eager: bool = option(
        False, "capture no CUDA graphs of decode steps and short prompts; on a CPU there are none"
    )
    no_warmup: bool = option(
        False,
        "serve at once: what first requests need is compiled, planned, captured and loaded while they wait",
    )
    seed: int | None = option(
        None,
        "makes the tokens of requests without a seed repeatable (default: another one at each start)",
        metavar="N",
        ge=0,
        le=2**64 - 1,
    )
    hot_cache: HotCacheSize = option(
        "auto",
        "tokens per KV head and layer kept on the device: a share, a number, or auto: all that fit",
        parse=read_hot_cache,
        metavar="SHARE|N",
    )
    gpu_memory_limit: int | float | None = option(
        "auto",
        "device memory of the whole worker: a size such as 24GiB, a share of the GPU's in (0, 1], or auto: what is "
        "free. On a CPU a share bounds nothing",
        also=("gpu-memory-utilization",),
        parse=read_memory_limit,
        metavar="SIZE|SHARE",
    )
    slot_memory_bytes: int | None = option(
        "auto",
        "device memory for the KV cache alone; auto: what the rest leaves",
        name="slot-memory",
        parse=auto_or_bytes,
        metavar="SIZE",
        ge=2**20,
        le=2**50,
    )
    transport: Literal["zero_copy", "shm", "grpc"] = option(
        "zero_copy",
        "how rows come from the arena: zero_copy (read where they lie), shm (gathered by the store), or grpc for a "
        "store on another host, which selects too, for bitkeys, pqcache and clusterkv only",
        metavar="NAME",
    )
    index_device: Literal["auto", "cpu", "gpu"] = option(
        "auto",
        "where indexes are trained: cpu (the store's cores), gpu (the model's device), or auto: by the store where "
        "that hides behind the prompt, else on the GPU",
        metavar="NAME",
    )
    prefix_cache: bool = option(True, "reuse what the store has of prompts that begin alike")
    hang_timeout_s: float = option(
        60.0,
        "seconds without progress after which a worker that has hung is ended, and started again, as a gateway is, and "
        "a store 30 s later; 0: never",
        name="hang-timeout",
        metavar="S",
        ge=0,
        le=86400,
    )
    shutdown_timeout_s: float = option(
        30.0,
        "seconds that running requests get to finish",
        name="shutdown-timeout",
        metavar="S",
        ge=0,
        le=86400,
    )


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options that only experiments set."""

    granularity: Literal["kv_head", "q_head"] = option(
        "kv_head",
        "select for each kv_head, or each q_head as some papers do, at a group times the KV cache",
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(WorkerOptions, StudyOptions, NeighbourOptions, LogOptions, TraceOptions):
    """Everything that the worker process is told.

    `gpu_memory_limit` bounds all that the process has on a CUDA device, `slot_memory_bytes` the slots alone;
    None: what is free, and what the rest leaves of that. Raises ConfigError, which names the flag, the value and the
    remedy.
    """

    model: str = option(
        REQUIRED, "model directory, GGUF file or hub id", positional=True, metavar="MODEL", min_length=1
    )
    json_events: bool = option(False, "one JSON object a line on stdout for a supervisor")

    def __post_init__(self) -> None:
        self.check_neighbours()
        if 0 < self.hang_timeout_s < LEAST_HANG_TIMEOUT_S:
            raise ConfigError(
                f"--hang-timeout {self.hang_timeout_s:g}: an idle worker tells of itself once a second; give "
                f"{LEAST_HANG_TIMEOUT_S:g} or more, or 0 for never"
            )
        if self.transport == "grpc" and self.index_device == "gpu":
            raise ConfigError(
                "--index-device gpu: with --transport grpc indexes stay in the store; leave it out"
            )
        self.check_selection()


def parse_arguments(argv: Sequence[str]) -> WorkerConfig:
    """The configuration from flags, variables and --config. Raises OptionError."""
    # imported late: making a record reads no options, and the libraries may be missing
    from carrel.process.settings import Parser, parse

    parser = Parser(prog="python -m gpu_worker", description="Serves one model's token ids over gRPC.")
    return parse(WorkerConfig, parser, argv)


def find_device(asked: str) -> str:
    """`cpu` or `cuda:INDEX`; "auto" is the first CUDA device when there is one.

    Raises ConfigError when the device asked for does not exist.
    """
    if asked == "cpu":
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        return "cuda:0" if count else "cpu"
    index = int(asked.partition(":")[2] or 0)
    if index >= count:
        raise ConfigError(f"--device {asked!r}: there are {count} CUDA devices; use cpu or auto")
    return f"cuda:{index}"


def find_dtype(asked: str, device: str) -> str | None:
    """Name of the torch dtype to compute in, None for the checkpoint's own: as asked; "auto" is the
    checkpoint's own on CUDA, and float32 on a CPU, which may have no arithmetic for 16-bit types."""
    if asked != "auto":
        return asked
    return "float32" if device == "cpu" else None
