"""Llama 2 and 3.x, Mistral, and the many models that use their architectures by name."""

from __future__ import annotations

from gpu_worker.layers import LayerSpec
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import MAX_POSITIONS, read_shape


def read_llama(fields: ConfigFields) -> ModelConfig:
    """Llama: biases where config.json says so."""
    shape = read_shape(fields)
    bias, mlp_bias = (fields.flag(name, default=False) for name in ("attention_bias", "mlp_bias"))
    attention = shape.attention(qkv_bias=bias, output_bias=bias)
    return shape.model(LayerSpec(shape.eps, attention, shape.gated_mlp(bias=mlp_bias)))


def read_mistral(fields: ConfigFields) -> ModelConfig:
    """Mistral 7B v0.1 to v0.3 and its relatives: v0.1 slides in every layer; later versions write null."""
    shape = read_shape(fields)
    window = fields.integer("sliding_window", 1, MAX_POSITIONS) if fields.has("sliding_window") else None
    return shape.model(LayerSpec(shape.eps, shape.attention(), shape.gated_mlp()), window)
