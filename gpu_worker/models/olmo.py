"""OLMo 1 and 2, dense."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers import LayerSpec, NormsOverWidth, PlainLayerNorm
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import read_shape

# OLMo 1 has no field for it
_EPS = 1e-5


def read_olmo(fields: ConfigFields) -> ModelConfig:
    """OLMo 1: LayerNorm without weights."""
    if fields.has("clip_qkv"):
        raise fields.fail("clip_qkv", "null: projections that are clipped are not supported")
    shape = read_shape(fields.changed({"rms_norm_eps": _EPS}))
    bias = fields.flag("attention_bias", default=False)
    attention = shape.attention(qkv_bias=bias, output_bias=bias)
    return shape.model(LayerSpec(shape.eps, attention, shape.gated_mlp(), norm=PlainLayerNorm))


def read_olmo2(fields: ConfigFields) -> ModelConfig:
    """OLMo 2: norms behind the blocks only, and norms of all queries and of all keys together."""
    shape = read_shape(fields)
    bias = fields.flag("attention_bias", default=False)
    attention = shape.attention(qkv_bias=bias, output_bias=bias, head_norms=True)
    return shape.model(
        behind_blocks(LayerSpec(shape.eps, replace(attention, norms=NormsOverWidth), shape.gated_mlp()))
    )


def behind_blocks(layer: LayerSpec) -> LayerSpec:
    """Return the layer with norms behind its blocks and none before."""
    return replace(
        layer,
        input_norm=None,
        attention_out_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_out_norm="post_feedforward_layernorm",
    )
