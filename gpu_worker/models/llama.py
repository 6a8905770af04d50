"""Llama 2 and 3.x, Mistral, and families that are Llamas with other names of fields."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers import LayerSpec
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import Shape, read_shape, read_window


def read_llama(fields: ConfigFields) -> ModelConfig:
    """Llama: biases where config.json says so."""
    bias, mlp_bias = (fields.flag(name, default=False) for name in ("attention_bias", "mlp_bias"))
    return _model(read_shape(fields), bias, mlp_bias)


def read_mistral(fields: ConfigFields) -> ModelConfig:
    """Mistral 7B v0.1 to v0.3 and its relatives: v0.1 slides in every layer; later versions write null."""
    shape = read_shape(fields)
    return shape.model(LayerSpec(shape.eps, shape.attention(), shape.gated_mlp()), read_window(fields))


def read_ministral3(fields: ConfigFields) -> ModelConfig:
    """Ministral 3 and Devstral 2: a Mistral whose queries grow with their position."""
    shape = read_shape(fields)
    settings = fields.object("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    rope = replace(shape.rope, query_growth=settings.number("llama_4_scaling_beta", 0.0, 1e3, default=0.0))
    attention = replace(shape.attention(), rope=rope)
    return shape.model(LayerSpec(shape.eps, attention, shape.gated_mlp()), read_window(fields))


def read_internlm3(fields: ConfigFields) -> ModelConfig:
    """InternLM 3: `qkv_bias` and `bias`, which transformers 5 writes by Llama's names."""
    qkv_bias = fields.flag("qkv_bias", default=fields.flag("attention_bias", default=False))
    bias = fields.flag("bias", default=fields.flag("mlp_bias", default=False))
    shape = read_shape(fields)
    attention = shape.attention(qkv_bias=qkv_bias, output_bias=bias)
    return shape.model(LayerSpec(shape.eps, attention, shape.gated_mlp(bias=bias)))


def read_iquestcoder(fields: ConfigFields) -> ModelConfig:
    """IQuest-Coder, the dense model without loops."""
    if fields.has("clip_qkv"):
        raise fields.fail("clip_qkv", "null: keys and values that are clipped are not supported")
    if fields.flag("use_sliding_window", default=False):
        raise fields.fail("use_sliding_window", "false")
    return read_llama(fields)


def read_ernie4_5(fields: ConfigFields) -> ModelConfig:
    """ERNIE 4.5, dense: RoPE turns neighbours, and one flag gives every projection its bias."""
    bias = fields.flag("use_bias", default=False)
    return _model(read_shape(fields, interleaved=True, rope_theta=500000.0, tied=True), bias, bias)


def read_helium(fields: ConfigFields) -> ModelConfig:
    """Helium 1: RoPE turns neighbours; the output has no bias."""
    shape = read_shape(fields, interleaved=True, rope_theta=100000.0)
    attention = shape.attention(qkv_bias=fields.flag("attention_bias", default=False))
    mlp = shape.gated_mlp(bias=fields.flag("mlp_bias", default=False))
    return shape.model(LayerSpec(shape.eps, attention, mlp))


def _model(shape: Shape, bias: bool, mlp_bias: bool) -> ModelConfig:
    attention = shape.attention(qkv_bias=bias, output_bias=bias)
    return shape.model(LayerSpec(shape.eps, attention, shape.gated_mlp(bias=mlp_bias)))
