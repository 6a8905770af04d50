"""The worker's command line: flags first, then `CARREL_*` variables, then the defaults of WorkerConfig."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NoReturn

from gpu_worker.config import DTYPES, LOAD_FORMATS, TRANSPORTS, HotCache, WorkerConfig, refuse
from gpu_worker.errors import ConfigError
from gpu_worker.records import Budget
from kv_store.client import KMEANS_METRICS, PQ_METRICS

_BYTE_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_arguments(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> WorkerConfig:
    """The configuration from flags, then `CARREL_*` variables, then defaults. Raises ConfigError.

    Every flag has its variable: `--max-num-seqs` is `CARREL_MAX_NUM_SEQS`, the model is `CARREL_MODEL`.
    Variables that are empty or belong to no flag of the worker are left alone. `--max-num-seqs` defaults
    to 8 on a CPU and to 32 on a GPU.
    """
    environ = os.environ if environ is None else environ
    parser = _build_parser()
    given = {name: text for name, text in vars(parser.parse_args(argv)).items() if text is not None}
    values: dict[str, object] = {}
    for field in fields(WorkerConfig):
        flag = _FLAGS[field.name]
        text = given.get(field.name, environ.get(flag.variable) or None)
        if text is not None:
            values[field.name] = flag.convert(flag.name, text)
    for name in ("model", "listen", "store"):
        if name not in values:
            how = "as the first argument" if name == "model" else f"with --{name}"
            raise ConfigError(f"No {name} is given; name it {how} or in {_FLAGS[name].variable}.")
    config = WorkerConfig(**values)  # type: ignore[arg-type]
    if "max_num_seqs" in values or config.resolve_device() == "cpu":
        return config
    return WorkerConfig(**{**values, "max_num_seqs": 32})  # type: ignore[arg-type]


def parse_budget(text: str) -> Budget:
    """A budget from text: a value in (0, 1] is a share, an integer from 2 up a number of tokens."""
    share, tokens = _share_or_tokens("budget", text)
    return Budget(share=share, tokens=tokens)


def parse_hot_cache(text: str) -> HotCache:
    """`auto`, a share in (0, 1] of the context, or a number of tokens from 2 up."""
    if text.strip().lower() == "auto":
        return HotCache()
    share, tokens = _share_or_tokens("hot-cache", text)
    return HotCache(share=share, tokens=tokens)


def parse_bytes(text: str, name: str = "slot-memory") -> int | None:
    """Bytes from `512MiB`, `2GiB` or a plain number; None for `auto`."""
    if text.strip().lower() == "auto":
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", text.strip())
    unit = _BYTE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        refuse(name, text, "use auto or a size such as 512MiB or 2GiB")
    return int(float(match[1]) * unit)


def _share_or_tokens(name: str, text: str) -> tuple[float | None, int | None]:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if 0 < value <= 1:
        return value, None
    if re.fullmatch(r"\s*\+?\d{1,15}\s*", text) and int(text) >= 2:
        return None, int(text)
    refuse(name, text, "give a share in (0, 1] such as 0.1, or a whole number of tokens from 2 up")


def _text(name: str, text: str) -> str:
    return text


def _integer(name: str, text: str) -> int:
    if not re.fullmatch(r"\s*[+-]?\d{1,20}\s*", text):
        refuse(name, text, "give a whole number")
    return int(text)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        refuse(name, text, "give a number")


def _switch(name: str, text: str) -> bool:
    if text.strip().lower() in ("1", "true", "yes", "on"):
        return True
    if text.strip().lower() in ("0", "false", "no", "off"):
        return False
    refuse(name, text, "use true or false")


@dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    convert: Callable[[str, str], object]
    help: str
    is_switch: bool = False

    @property
    def variable(self) -> str:
        return "CARREL_" + self.name.upper().replace("-", "_")


# keyed by the field of WorkerConfig that the flag fills
_FLAGS = {
    "model": _Flag("model", _text, "model directory or hub id"),
    "listen": _Flag("listen", _text, "unix:PATH or HOST:PORT to serve gRPC on"),
    "store": _Flag("store", _text, "unix:PATH or HOST:PORT of the KV store"),
    "allow_remote": _Flag("allow-remote", _switch, "permit a listen address beyond loopback", is_switch=True),
    "store_token": _Flag("store-token", _text, "what the store asks for; better as CARREL_STORE_TOKEN"),
    "store_token_file": _Flag("store-token-file", _text, "file that holds the store's token"),
    "store_timeout_seconds": _Flag(
        "store-timeout", _number, "seconds to wait for the store at the start (60)"
    ),
    "device": _Flag("device", _text, "auto, cpu, cuda or cuda:INDEX (auto)"),
    "dtype": _Flag("dtype", _text, f"{', '.join(DTYPES)} (auto: float32 on a CPU, else the model's)"),
    "threads": _Flag("threads", _integer, "CPU threads for torch (all cores that the process may use)"),
    "max_model_len": _Flag("max-model-len", _integer, "longest prompt and completion together (the model's)"),
    "max_num_seqs": _Flag("max-num-seqs", _integer, "requests that run at once (8 on a CPU, 32 on a GPU)"),
    "max_queue": _Flag("max-queue", _integer, "requests that may wait (64)"),
    "prefill_chunk": _Flag("prefill-chunk", _integer, "tokens of one prefill quantum (2048)"),
    "policy": _Flag("policy", _text, "KV policy of requests that name none, or auto (pqcache)"),
    "budget": _Flag(
        "budget", lambda _, text: parse_budget(text), "share in (0, 1] or tokens from 2 up (0.1)"
    ),
    "hot_cache": _Flag("hot-cache", lambda _, text: parse_hot_cache(text), "auto, a share or tokens (auto)"),
    "gpu_memory_limit_bytes": _Flag(
        "gpu-memory-limit",
        lambda name, text: parse_bytes(text, name),
        "device memory of the whole process, such as 24GiB, or auto: what is free (auto)",
    ),
    "slot_memory_bytes": _Flag(
        "slot-memory",
        lambda name, text: parse_bytes(text, name),
        "of the slots, such as 2GiB, or auto (auto)",
    ),
    "transport": _Flag("transport", _text, f"how rows travel: {', '.join(TRANSPORTS)} (zero_copy)"),
    "index_device": _Flag(
        "index-device", _text, "who trains indexes: cpu, the store's cores, or gpu, the model's device (cpu)"
    ),
    "prefix_cache": _Flag("prefix-cache", _text, "on, off: reuse rows of prompts that begin alike (on)"),
    "full_layers": _Flag("full-layers", _integer, "first layers that attend to everything (0)"),
    "pq_num_subvectors": _Flag("pq-subvectors", _integer, "PQ: parts that a key is split into (2)"),
    "pq_nbits": _Flag("pq-bits", _integer, "PQ: bits of a code, one per part (6)"),
    "pq_iterations": _Flag("pq-iterations", _integer, "PQ: K-means iterations; 0 is adaptive (0)"),
    "pq_metric": _Flag("pq-metric", _text, f"PQ: {', '.join(PQ_METRICS)}, of its codebooks (l2)"),
    "clusterkv_tokens_per_cluster": _Flag(
        "clusterkv-tokens-per-cluster", _integer, "ClusterKV: mean cluster size (80)"
    ),
    "clusterkv_metric": _Flag(
        "clusterkv-metric", _text, f"ClusterKV: {', '.join(KMEANS_METRICS)}, of clustering (cosine)"
    ),
    "calibration": _Flag(
        "calibration",
        _text,
        "file of `carrel calibrate`: InfiniGen takes its skew; adds the policy chelsea+outliers",
    ),
    "outlier_share": _Flag("outlier-share", _number, "of all KV heads, chelsea+outliers keeps whole (0.04)"),
    "granularity": _Flag(
        "granularity",
        _text,
        "kv_head, or q_head: selection by each query head, as some papers do, at a group times the KV (kv_head)",
    ),
    "load_format": _Flag("load-format", _text, f"{', '.join(LOAD_FORMATS)} (auto)"),
    "revision": _Flag("revision", _text, "branch, tag or commit of a hub id"),
    "seed": _Flag("seed", _integer, "makes the tokens of requests without a seed repeatable"),
    "shutdown_timeout_seconds": _Flag(
        "shutdown-timeout", _number, "seconds to finish requests on SIGTERM (30)"
    ),
    "json_events": _Flag("json-events", _switch, "one JSON object a line on stdout", is_switch=True),
}


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError instead of leaving."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}. See {self.prog} --help.")


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m gpu_worker",
        description="Serves one model's token ids over gRPC.",
        epilog="Every flag can be set as CARREL_NAME_OF_THE_FLAG in the environment; flags win.",
        allow_abbrev=False,
    )
    for field, flag in _FLAGS.items():
        if field == "model":
            parser.add_argument("model", nargs="?", metavar="MODEL", help=flag.help)
        elif flag.is_switch:
            parser.add_argument(
                f"--{flag.name}", dest=field, action="store_const", const="true", help=flag.help
            )
        else:
            parser.add_argument(f"--{flag.name}", dest=field, metavar="X", help=flag.help)
    return parser
