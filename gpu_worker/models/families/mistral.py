"""Mistral 7B v0.1 to v0.3 and its relatives of the same `model_type`."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.families.base import MAX_POSITIONS, Family, read_common


def read_config(fields: ConfigFields) -> ModelConfig:
    # v0.1 slides in every layer; later versions write null
    window = fields.integer("sliding_window", 1, MAX_POSITIONS) if fields.has("sliding_window") else None
    return replace(read_common(fields), sliding_window=window)


MISTRAL = Family("mistral", read_config)
