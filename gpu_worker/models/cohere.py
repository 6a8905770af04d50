"""Command R and Aya 23, without norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers import ParallelLayerSpec, ScaledLayerNorm
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import read_shape


def read_cohere(fields: ConfigFields) -> ModelConfig:
    """Command R: attention and MLP read the same norm, RoPE turns neighbours, and logits are scaled."""
    if fields.flag("use_qk_norm", default=False):
        raise fields.fail("use_qk_norm", "false: a norm with a weight for each head is not supported")
    shape = read_shape(fields, interleaved=True, rope_theta=500000.0, eps="layer_norm_eps", tied=True)
    bias = fields.flag("attention_bias", default=False)
    attention = shape.attention(qkv_bias=bias, output_bias=bias)
    layer = ParallelLayerSpec(shape.eps, attention, shape.gated_mlp(), norm=ScaledLayerNorm)
    return replace(shape.model(layer), logit_scale=fields.number("logit_scale", 1e-6, 1e6, default=0.0625))
