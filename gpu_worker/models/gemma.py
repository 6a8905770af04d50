"""Gemma 1."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers import LayerSpec, ShiftedRmsNorm
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import read_shape


def read_gemma(fields: ConfigFields) -> ModelConfig:
    """Gemma: GELU gates, norms of a shifted weight, embeddings times the root of their width. Its early files say
    `gelu` and mean the approximation with a tanh."""
    if fields.flag("use_bidirectional_attention", default=False):
        raise fields.fail("use_bidirectional_attention", "false")
    shape = read_shape(fields, activations=("gelu_pytorch_tanh", "gelu"), tied=True)
    bias = fields.flag("attention_bias", default=False)
    attention = shape.attention(qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(shape.eps, attention, shape.gated_mlp("gelu_tanh_mul"), norm=ShiftedRmsNorm)
    return replace(shape.model(layer), embedding_scale=shape.hidden_size**0.5)
