"""Granite 3.x, dense."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers import LayerSpec
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import read_shape


def read_granite(fields: ConfigFields) -> ModelConfig:
    """Granite 3.x: a Llama with four multipliers. They are applied when it runs: folded into 16-bit weights they would
    round these once more."""
    shape = read_shape(fields)
    bias = fields.flag("attention_bias", default=False)
    scale = fields.number("attention_multiplier", 1e-6, 1e6, default=1.0)
    layer = LayerSpec(
        shape.eps,
        replace(shape.attention(qkv_bias=bias, output_bias=bias), scale=scale),
        shape.gated_mlp(bias=fields.flag("mlp_bias", default=False)),
        residual_scale=fields.number("residual_multiplier", 1e-6, 1e6, default=1.0),
    )
    return replace(
        shape.model(layer),
        embedding_scale=fields.number("embedding_multiplier", 1e-6, 1e6, default=1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1e-6, 1e6, default=1.0),
    )
