"""Sampling defaults of a model: user's value first, then `generation_config.json`, then OpenAI's default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_defaults(generation_config: Mapping[str, Any]) -> GenerationDefaults:
    """Defaults from a model's generation config; `do_sample: false` means greedy. Raises ConfigError."""
    known: dict[str, Any] = {}
    for name in GenerationDefaults.__dataclass_fields__:
        value = generation_config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"generation_config.json: {name} is {value!r}, not a number from 0 up")
        known[name] = value
    if generation_config.get("do_sample") is False:
        known["temperature"] = 0.0
    return GenerationDefaults(**known)
