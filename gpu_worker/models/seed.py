"""Seed-OSS."""

from __future__ import annotations

from gpu_worker.layers import LayerSpec
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import read_shape


def read_seed_oss(fields: ConfigFields) -> ModelConfig:
    """Seed-OSS: biases of queries, keys and values, of the output and of the MLP, each by its own flag."""
    shape = read_shape(fields)
    attention = shape.attention(
        qkv_bias=fields.flag("attention_bias", default=True),
        output_bias=fields.flag("attention_out_bias", default=False),
    )
    mlp = shape.gated_mlp(bias=fields.flag("mlp_bias", default=False))
    return shape.model(LayerSpec(shape.eps, attention, mlp))
