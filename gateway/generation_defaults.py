"""Sampling defaults of a model: what a request leaves out comes from here, then from the worker's own defaults."""

from __future__ import annotations

import json
from pathlib import Path

from carrel.process.request_limits import RANGES
from gateway.errors import ConfigError
from gpu_worker.v1 import gpu_worker_pb2 as pb

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_defaults(model_dir: Path) -> pb.SamplingParams:
    """From `generation_config.json`, where the model has one; `do_sample: false` means greedy. Raises ConfigError."""
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return pb.SamplingParams()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object")
    known = {name: values[name] for name in FIELDS if values.get(name) is not None}
    if values.get("do_sample") is False:
        known["temperature"] = 0.0
    for name, value in known.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in RANGES[name]:
            raise ConfigError(f"{path}: {name} is {value!r}; it must be a number in {RANGES[name]}")
    return pb.SamplingParams(**{**known, **({"top_k": int(known["top_k"])} if "top_k" in known else {})})
