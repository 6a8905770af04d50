"""StableLM 2 and 3B."""

from __future__ import annotations

from gpu_worker.layers import LayerNorm, LayerSpec, ParallelLayerSpec
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import read_shape


def read_stablelm(fields: ConfigFields) -> ModelConfig:
    """StableLM: LayerNorm, and a quarter of each head turns."""
    if fields.flag("qk_layernorm", default=False):
        raise fields.fail("qk_layernorm", "false: a norm for each head is not supported")
    shape = read_shape(fields, partial_rotary_factor=0.25, eps="layer_norm_eps")
    attention = shape.attention(qkv_bias=fields.flag("use_qkv_bias", default=False))
    is_parallel = fields.flag("use_parallel_residual", default=False)
    kind = ParallelLayerSpec if is_parallel else LayerSpec
    return shape.model(kind(shape.eps, attention, shape.gated_mlp(), norm=LayerNorm))
