"""Families whose MLP has no gate: Arcee's AFM, Nemotron, StarCoder 2, Jais 2."""

from __future__ import annotations

from gpu_worker.layers import LayerNorm, LayerSpec, Norm, RmsNorm, ShiftedLayerNorm
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import Shape, read_shape, read_window

_SQUARED_RELU = ("relu2",)


def read_arcee(fields: ConfigFields) -> ModelConfig:
    """AFM: a Llama with a squared ReLU."""
    shape = read_shape(fields, activations=_SQUARED_RELU)
    return shape.model(_squared_relu_layer(shape, fields))


def read_nemotron(fields: ConfigFields) -> ModelConfig:
    """Nemotron and Minitron: LayerNorm of a shifted weight, and half of each head turns."""
    shape = read_shape(fields, activations=_SQUARED_RELU, partial_rotary_factor=0.5, eps="norm_eps")
    return shape.model(_squared_relu_layer(shape, fields, norm=ShiftedLayerNorm))


def read_jais2(fields: ConfigFields) -> ModelConfig:
    """Jais 2: LayerNorm, and biases everywhere."""
    shape = read_shape(fields, activations=_SQUARED_RELU, eps="layer_norm_eps")
    return shape.model(_squared_relu_layer(shape, fields, bias=True, norm=LayerNorm))


def read_starcoder2(fields: ConfigFields) -> ModelConfig:
    """StarCoder 2: LayerNorm, GELU, and biases everywhere; its window caps the length."""
    shape = read_shape(fields, activations=("gelu_pytorch_tanh",), eps="norm_epsilon", tied=True)
    bias = fields.flag("use_bias", default=True)
    attention = shape.attention(qkv_bias=bias, output_bias=bias)
    mlp = shape.plain_mlp("gelu_tanh", bias=bias, names=("c_fc", "c_proj"))
    return shape.model(LayerSpec(shape.eps, attention, mlp, norm=LayerNorm), read_window(fields))


def _squared_relu_layer(
    shape: Shape, fields: ConfigFields, *, bias: bool = False, norm: type[Norm] = RmsNorm
) -> LayerSpec:
    """Return a layer of these. bias: where config.json says nothing."""
    attention_bias, mlp_bias = (fields.flag(name, default=bias) for name in ("attention_bias", "mlp_bias"))
    attention = shape.attention(qkv_bias=attention_bias, output_bias=attention_bias)
    return LayerSpec(shape.eps, attention, shape.plain_mlp("relu2", bias=mlp_bias), norm=norm)
