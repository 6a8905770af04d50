"""GLM-4-9B (2024) in its transformers form, and GLM-4-0414."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers import LayerSpec
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import Shape, read_shape


def read_glm(fields: ConfigFields) -> ModelConfig:
    """GLM-4-9B: half of each head rotates, in interleaved pairs; gate and up are one matrix."""
    shape = _read_shape(fields)
    return shape.model(_layer(shape, fields))


def read_glm4(fields: ConfigFields) -> ModelConfig:
    """GLM-4-0414: a norm behind each block too."""
    shape = _read_shape(fields)
    layer = replace(
        _layer(shape, fields),
        attention_out_norm="post_self_attn_layernorm",
        mlp_out_norm="post_mlp_layernorm",
    )
    return shape.model(layer)


def _read_shape(fields: ConfigFields) -> Shape:
    return read_shape(fields, interleaved=True, partial_rotary_factor=0.5)


def _layer(shape: Shape, fields: ConfigFields) -> LayerSpec:
    attention = shape.attention(qkv_bias=fields.flag("attention_bias", default=True))
    return LayerSpec(shape.eps, attention, shape.gated_mlp(fused=True))
