"""Qwen 2, 2.5 and 3, dense."""

from __future__ import annotations

from gpu_worker.errors import ModelError
from gpu_worker.layers import LayerSpec
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import MAX_POSITIONS, read_shape


def read_qwen2(fields: ConfigFields) -> ModelConfig:
    """Qwen 2 and 2.5: biases on queries, keys and values."""
    shape = read_shape(fields)
    layer = LayerSpec(shape.eps, shape.attention(qkv_bias=True), shape.gated_mlp())
    return shape.model(layer, _read_window(fields))


def read_qwen3(fields: ConfigFields) -> ModelConfig:
    """Qwen 3 (dense): RMSNorm on each head's query and key."""
    shape = read_shape(fields)
    bias = fields.flag("attention_bias", default=False)
    attention = shape.attention(qkv_bias=bias, output_bias=bias, head_norms=True)
    return shape.model(LayerSpec(shape.eps, attention, shape.gated_mlp()), _read_window(fields))


def _read_window(fields: ConfigFields) -> int | None:
    """Return the sliding window, which holds only where `use_sliding_window` says so."""
    unknown = set(fields.texts("layer_types")) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(
            f"{fields.where}: layer_types {sorted(unknown)} are not supported; only full_attention is"
        )
    if not fields.flag("use_sliding_window", default=False) or not fields.has("sliding_window"):
        return None
    return fields.integer("sliding_window", 1, MAX_POSITIONS)
