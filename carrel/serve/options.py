"""The options of `carrel serve`: each is written once, with its spelling and the processes that take it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from carrel.serve.flags import (
    GATEWAY,
    STORE,
    WORKER,
    Flag,
    auto_or_share_or_tokens,
    flag,
    natural_int,
    num_bytes,
    one_of,
    positive_int,
    seconds,
    share_or_tokens,
    switch,
    tcp_port,
)
from carrel.serve.restarts import DEFAULT_LIMIT


@dataclass(frozen=True)
class ServeOptions:
    """What `carrel serve` was asked for. None leaves the choice to the process that takes the flag."""

    model: str | None = flag(
        None, "model directory or Hugging Face id (default: the bundled carrel-nano)", metavar="MODEL"
    )
    host: str = flag("127.0.0.1", "address to listen on", to={GATEWAY: "--host"}, metavar="ADDRESS")
    port: int = flag(8000, "HTTP port; 0 takes a free one", tcp_port, metavar="N")
    grpc_port: int = flag(8001, "chat gRPC port; 0 turns it off", tcp_port, metavar="N")
    api_key: str | None = flag(None, "key that clients must send", metavar="KEY", is_secret=True)
    allow_open: bool = switch("serve an address beyond this machine without a key", {GATEWAY: "--allow-open"})
    served_model_name: str | None = flag(
        None, "name in the API (default: the model's)", to={GATEWAY: "--served-model-name"}, metavar="NAME"
    )
    dtype: str | None = flag(
        None,
        "computation type: auto, bfloat16, float16 or float32",
        one_of("auto", "bfloat16", "float16", "float32"),
        {WORKER: "--dtype"},
        metavar="TYPE",
    )
    device: str | None = flag(None, "auto, cuda, cuda:N or cpu", to={WORKER: "--device"}, metavar="DEVICE")
    max_model_len: int | None = flag(
        None,
        "longest prompt and answer together, in tokens",
        positive_int,
        {WORKER: "--max-model-len"},
        metavar="N",
    )
    max_num_seqs: int | None = flag(
        None, "requests decoded at once", positive_int, {WORKER: "--max-num-seqs"}, metavar="N"
    )
    policy: str | None = flag(
        None,
        "selection policy of requests that name none, or auto: full for short ones, else pqcache",
        to={WORKER: "--policy"},
        aliases=("kv_policy",),
        metavar="NAME",
    )
    budget: str | None = flag(
        None,
        "tokens attended per KV head and step: a share in (0, 1] or a number from 2 up",
        share_or_tokens,
        {WORKER: "--budget"},
        metavar="SHARE|N",
    )
    full_layers: int | None = flag(
        None,
        "first layers that attend to everything, whatever the policy",
        natural_int,
        {WORKER: "--full-layers"},
        metavar="N",
    )
    hot_cache: str | None = flag(
        None,
        "tokens per KV head and layer kept on the device: a share, a number, or auto (all that fit)",
        auto_or_share_or_tokens,
        {WORKER: "--hot-cache"},
        metavar="SHARE|N",
    )
    gpu_memory_limit: int | None = flag(
        None,
        "device memory of the whole worker (default: what is free)",
        num_bytes,
        {WORKER: "--gpu-memory-limit"},
        metavar="SIZE",
    )
    slot_memory: int | None = flag(
        None, "device memory for the KV cache alone", num_bytes, {WORKER: "--slot-memory"}, metavar="SIZE"
    )
    transport: str | None = flag(
        None,
        "how rows come from the arena: zero_copy, shm or grpc",
        one_of("zero_copy", "shm", "grpc"),
        {WORKER: "--transport"},
        metavar="NAME",
    )
    index_device: str | None = flag(
        None,
        "who trains indexes: cpu, the store's cores, or gpu, the model's device",
        one_of("cpu", "gpu"),
        {WORKER: "--index-device"},
        metavar="NAME",
    )
    granularity: str | None = flag(
        None,
        "select for each kv_head, or each q_head as some papers do, at a group times the KV cache",
        one_of("kv_head", "q_head"),
        {WORKER: "--granularity"},
        metavar="NAME",
    )
    calibration: str | None = flag(
        None,
        "file of carrel calibrate: outlier heads for chelsea+outliers, InfiniGen's skew",
        to={WORKER: "--calibration"},
        metavar="FILE",
    )
    prefix_cache: str | None = flag(
        None,
        "reuse what the store has of prompts that begin alike: on or off",
        one_of("on", "off"),
        {WORKER: "--prefix-cache"},
        metavar="NAME",
    )
    prefill_chunk: int | None = flag(
        None, "tokens of a prompt computed at once", positive_int, {WORKER: "--prefill-chunk"}, metavar="N"
    )
    arena_bytes: int | None = flag(
        None,
        "host memory for the KV cache (default: a quarter of what is free)",
        num_bytes,
        {STORE: "--arena-bytes"},
        aliases=("kv_store_memory",),
        metavar="SIZE",
    )
    slab_bytes: int | None = flag(
        None, "unit of allocation in the arena", num_bytes, {STORE: "--slab-bytes"}, metavar="SIZE"
    )
    trainers: int | None = flag(
        None, "processes that train indexes", positive_int, {STORE: "--trainers"}, metavar="N"
    )
    load_format: str | None = flag(
        None,
        "safetensors, or dummy for random weights",
        one_of("auto", "safetensors", "dummy"),
        {WORKER: "--load-format"},
        metavar="NAME",
    )
    revision: str | None = flag(
        None,
        "branch, tag or commit of a Hub model",
        to={WORKER: "--revision", GATEWAY: "--revision"},
        metavar="NAME",
    )
    chat_template: str | None = flag(
        None, "Jinja file instead of the model's template", to={GATEWAY: "--chat-template"}, metavar="FILE"
    )
    shutdown_timeout: float = flag(
        30.0,
        "seconds that running requests get to finish",
        seconds,
        {WORKER: "--shutdown-timeout", GATEWAY: "--shutdown-timeout"},
        metavar="S",
    )
    restarts: int = flag(
        DEFAULT_LIMIT,
        "times within 10 minutes that a process which dies is started again; 0: its death ends everything",
        natural_int,
        metavar="N",
    )
    log_level: str = flag(
        "warning",
        "debug, info, warning or error",
        one_of("debug", "info", "warning", "error"),
        {GATEWAY: "--log-level"},
        metavar="LEVEL",
    )


def flags() -> dict[str, Flag]:
    """Every option's `Flag` by its field name."""
    return {item.name: item.metadata["flag"] for item in fields(ServeOptions)}


def default_of(name: str) -> Any:
    """An option's value when nobody names one."""
    return ServeOptions.__dataclass_fields__[name].default


def child_arguments(options: ServeOptions, child: str) -> list[str]:
    """The flags of one process, in its own spelling. Options left to the process are not passed."""
    arguments = []
    for name, item in flags().items():
        value = getattr(options, name)
        if child not in item.to or value is None or value is False:
            continue
        arguments += [item.to[child]] if item.is_switch else [item.to[child], str(value)]
    return arguments
