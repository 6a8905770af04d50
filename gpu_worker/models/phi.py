"""Phi 3, 3.5 and 4, dense."""

from __future__ import annotations

from gpu_worker.layers import LayerSpec
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import read_shape, read_window


def read_phi3(fields: ConfigFields) -> ModelConfig:
    """Phi 3 to 4: one matrix of queries, keys and values, one of gate and up; the long ones turn by LongRoPE."""
    shape = read_shape(fields)
    layer = LayerSpec(shape.eps, shape.attention(fused=True), shape.gated_mlp(fused=True))
    return shape.model(layer, read_window(fields))
