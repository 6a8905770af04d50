"""Llama 2 and 3.x, and the many models that use its architecture by name."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.families.base import Family, read_common


def read_config(fields: ConfigFields) -> ModelConfig:
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        read_common(fields),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


LLAMA = Family("llama", read_config)
