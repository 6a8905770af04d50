"""EXAONE 4 without windows."""

from __future__ import annotations

from gpu_worker.layers import LayerSpec
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.olmo import behind_blocks
from gpu_worker.models.shape import read_shape


def read_exaone4(fields: ConfigFields) -> ModelConfig:
    """EXAONE 4, 1.2B: norms behind the blocks only, and norms of each query and key head."""
    if fields.has("sliding_window"):
        raise fields.fail("sliding_window", "null: layers that differ in their windows are not supported")
    shape = read_shape(fields)
    return shape.model(
        behind_blocks(LayerSpec(shape.eps, shape.attention(head_norms=True), shape.gated_mlp()))
    )
