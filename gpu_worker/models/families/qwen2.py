"""Qwen 2 and 2.5: biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.families.base import Family, read_common, read_layer_window


def read_config(fields: ConfigFields) -> ModelConfig:
    return replace(read_common(fields), qkv_bias=True, sliding_window=read_layer_window(fields))


QWEN2 = Family("qwen2", read_config)
