"""The worker's configuration: one frozen record, checked on construction."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from carrel.process.token import read_token
from gpu_worker.errors import ConfigError
from gpu_worker.records import Budget
from kv_store.client import KMEANS_METRICS, PQ_METRICS

DTYPES = ("auto", "float32", "bfloat16", "float16")
INDEX_DEVICES = ("cpu", "gpu")
TRANSPORTS = ("zero_copy", "shm", "grpc")
GRANULARITIES = ("kv_head", "q_head")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
ROW_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

MAX_UNIX_PATH_BYTES = 107
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


@dataclass(frozen=True, slots=True)
class HotCache:
    """Slots per KV head and layer that keep recalled tokens on the device.

    Both fields None is "auto": as many as memory allows. Otherwise a `share` of the context in (0, 1], or a
    number of `tokens`.
    """

    share: float | None = None
    tokens: int | None = None

    @property
    def is_auto(self) -> bool:
        return self.share is None and self.tokens is None


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything a worker is told at its start; checked on construction.

    `listen` and `store` are `unix:PATH` or `HOST:PORT`. `gpu_memory_limit_bytes` bounds all that the process has on
    a CUDA device, `slot_memory_bytes` the slots alone; None: what is free, and what the rest leaves of that.
    `max_model_len` None is the model's own. `pq_iterations` 0 is the store's adaptive bound. `index_device`: "cpu",
    the store's trainers; "gpu", the worker's own device. `prefix_cache` "on": prefixes that the store has
    are not computed again. `calibration` is a file of `carrel calibrate`; of all KV
    heads, `outlier_share` are its outliers. `granularity` "q_head" gives every query head KV of its own, to select by.
    Raises ConfigError, which names the flag, the value and the remedy.
    """

    model: str
    listen: str
    store: str
    allow_remote: bool = False
    store_timeout_seconds: float = 60.0
    store_token: str = field(default="", repr=False)
    store_token_file: str = ""
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_queue: int = 64
    prefill_chunk: int = 2048
    policy: str = "pqcache"
    budget: Budget = field(default_factory=lambda: Budget(share=0.1))
    hot_cache: HotCache = HotCache()
    gpu_memory_limit_bytes: int | None = None
    slot_memory_bytes: int | None = None
    transport: str = "zero_copy"
    index_device: str = "cpu"
    prefix_cache: str = "on"
    full_layers: int = 0
    pq_num_subvectors: int = 2
    pq_nbits: int = 6
    pq_iterations: int = 0
    pq_metric: str = "l2"
    clusterkv_tokens_per_cluster: int = 80
    clusterkv_metric: str = "cosine"
    calibration: str | None = None
    outlier_share: float = 0.04
    granularity: str = "kv_head"
    load_format: str = "auto"
    revision: str | None = None
    seed: int | None = None
    shutdown_timeout_seconds: float = 30.0
    json_events: bool = False

    def __post_init__(self) -> None:
        if not self.model:
            refuse("model", self.model, "give a model directory or a hub id")
        _check_address("listen", self.listen, self.allow_remote)
        _check_address("store", self.store, allow_remote=True)
        try:
            object.__setattr__(self, "store_token", read_token(self.store_token, self.store_token_file))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.transport == "grpc" and self.index_device == "gpu":
            refuse(
                "index-device",
                self.index_device,
                "with --transport grpc indexes stay in the store; leave it out",
            )
        _check_device(self.device)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("transport", self.transport, TRANSPORTS)
        _check_choice("index-device", self.index_device, INDEX_DEVICES)
        _check_choice("granularity", self.granularity, GRANULARITIES)
        _check_choice("prefix-cache", self.prefix_cache, ("on", "off"))
        _check_choice("load-format", self.load_format, LOAD_FORMATS)
        _check_choice("pq-metric", self.pq_metric, PQ_METRICS)
        _check_choice("clusterkv-metric", self.clusterkv_metric, KMEANS_METRICS)
        if not self.policy:
            refuse("policy", self.policy, "name a policy, for instance pqcache, full or auto")
        _check_range("threads", self.threads, 1, 4096)
        _check_range("max-model-len", self.max_model_len, 2, 2**24)
        _check_range("max-num-seqs", self.max_num_seqs, 1, 4096)
        _check_range("max-queue", self.max_queue, 0, 2**20)
        _check_range("prefill-chunk", self.prefill_chunk, 1, 2**20)
        _check_range("gpu-memory-limit", self.gpu_memory_limit_bytes, 2**20, 2**50)
        _check_range("slot-memory", self.slot_memory_bytes, 2**20, 2**50)
        _check_range("full-layers", self.full_layers, 0, 4096)
        _check_range("pq-subvectors", self.pq_num_subvectors, 1, 64)
        _check_range("pq-bits", self.pq_nbits, 1, 8)
        _check_range("pq-iterations", self.pq_iterations, 0, 1000)
        _check_range("clusterkv-tokens-per-cluster", self.clusterkv_tokens_per_cluster, 2, 2**16)
        _check_range("outlier-share", self.outlier_share, 0, 1)
        _check_range("seed", self.seed, 0, 2**64 - 1)
        _check_range("store-timeout", self.store_timeout_seconds, 0, 86400)
        _check_range("shutdown-timeout", self.shutdown_timeout_seconds, 0, 86400)
        _check_share_or_tokens("budget", self.budget.share, self.budget.tokens, optional=False)
        _check_share_or_tokens("hot-cache", self.hot_cache.share, self.hot_cache.tokens, optional=True)

    def resolve_device(self) -> str:
        """`find_device` of the one asked for."""
        return find_device(self.device)

    def resolve_dtype(self, device: str, model_dtype: str | None) -> str:
        """`find_dtype` of the one asked for."""
        return find_dtype(self.dtype, device, model_dtype)


def find_device(asked: str) -> str:
    """`cpu` or `cuda:INDEX`; "auto" is the first CUDA device when there is one.

    Raises ConfigError when the device asked for does not exist.
    """
    _check_device(asked)
    if asked == "cpu":
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        return "cuda:0" if count else "cpu"
    index = int(asked.partition(":")[2] or 0)
    if index >= count:
        refuse("device", asked, f"there are {count} CUDA devices; use cpu or auto")
    return f"cuda:{index}"


def find_dtype(asked: str, device: str, model_dtype: str | None) -> str:
    """Name of the torch dtype to compute in: as asked; else float32 on a CPU, and on CUDA the
    model's own when it is a 16-bit type, bfloat16 otherwise."""
    if asked != "auto":
        return asked
    if device == "cpu":
        return "float32"
    return model_dtype if model_dtype in ("bfloat16", "float16") else "bfloat16"


def row_type(dtype: str) -> str:
    """Element type of the arena's rows for a compute dtype: `fp32`, `bf16` or `fp16`."""
    return ROW_TYPES[dtype]


def refuse(name: str, value: object, remedy: str) -> NoReturn:
    """Raise the ConfigError of flag `name`."""
    raise ConfigError(f"--{name} {value!r} cannot be used: {remedy}.")


def _check_device(asked: str) -> None:
    if not _DEVICE.fullmatch(asked):
        refuse("device", asked, "use auto, cpu, cuda or cuda:INDEX")


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        refuse(name, value, f"choose one of {', '.join(choices)}")


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    # the negated form also refuses NaN
    if value is not None and not low <= value <= high:
        refuse(name, value, f"give a value from {low} to {high}")


def _check_share_or_tokens(name: str, share: float | None, tokens: int | None, *, optional: bool) -> None:
    num_set = (share is not None) + (tokens is not None)
    if num_set > 1 or (num_set == 0 and not optional):
        refuse(name, (share, tokens), "set a share or a number of tokens, not both")
    if share is not None and not 0 < share <= 1:
        refuse(name, share, "a share lies in (0, 1]")
    if tokens is not None and tokens < 2:
        refuse(name, tokens, "a number of tokens is 2 or more")


def _check_address(name: str, address: str, allow_remote: bool) -> None:
    scheme, _, path = address.partition(":")
    if scheme == "unix":
        if not path or "\0" in path:
            refuse(name, address, "name a socket path, as in unix:/run/carrel/gpu_worker.sock")
        if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
            refuse(
                name,
                address,
                f"a socket path has at most {MAX_UNIX_PATH_BYTES} bytes; use a shorter one",
            )
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not re.fullmatch(r"\d{1,5}", port) or not 1 <= int(port) <= 65535:
        refuse(name, address, "use unix:PATH or HOST:PORT with a port from 1 to 65535")
    if not allow_remote and not _is_loopback(host.strip("[]")):
        refuse(name, address, "it is not a loopback address; use 127.0.0.1 or add --allow-remote")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
