"""Qwen 3 (dense): RMSNorm on each head's query and key."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.families.base import Family, read_common, read_layer_window


def read_config(fields: ConfigFields) -> ModelConfig:
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        read_common(fields),
        qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        sliding_window=read_layer_window(fields),
    )


QWEN3 = Family("qwen3", read_config)
