"""Hunyuan dense, 0.5B to 7B."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers import LayerSpec, NormsAfterRope
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import read_shape


def read_hunyuan_v1_dense(fields: ConfigFields) -> ModelConfig:
    """Hunyuan dense: norms of turned queries and keys, and a base of RoPE that `alpha` raises."""
    shape = read_shape(fields)
    bias = fields.flag("attention_bias", default=False)
    attention = replace(
        shape.attention(qkv_bias=bias, output_bias=bias),
        rope=replace(shape.rope, theta=shape.rope.theta * _raised(fields, shape.head_dim)),
        head_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"),
        norms=NormsAfterRope,
    )
    return shape.model(LayerSpec(shape.eps, attention, shape.gated_mlp()))


def _raised(fields: ConfigFields, head_dim: int) -> float:
    settings = fields.object("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    is_dynamic = "dynamic" in (settings.text("rope_type", ""), settings.text("type", ""))
    if not is_dynamic or not settings.has("alpha"):
        return 1.0
    return settings.number("alpha", 1.0, 1e6) ** (head_dim / (head_dim - 2))
