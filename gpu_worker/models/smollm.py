"""SmolLM 3."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers import LayerSpec
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.shape import read_shape


def read_smollm3(fields: ConfigFields) -> ModelConfig:
    """SmolLM 3: a Llama in which every fourth layer has no RoPE."""
    if fields.flag("use_sliding_window", default=False):
        raise fields.fail(
            "use_sliding_window", "false: layers that differ in their windows are not supported"
        )
    shape = read_shape(fields, rope_theta=2e6, tied=True)
    bias = fields.flag("attention_bias", default=False)
    attention = shape.attention(qkv_bias=bias, output_bias=bias)
    turned = LayerSpec(shape.eps, attention, shape.gated_mlp(bias=fields.flag("mlp_bias", default=False)))
    unturned = replace(turned, attention=replace(attention, rope=None))
    layers = tuple(turned if is_turned else unturned for is_turned in _turned(fields, shape.num_layers))
    return replace(shape.model(turned), layers=layers)


def _turned(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have RoPE. `no_rope_layers` has, in spite of its name, a 1 for these."""
    if fields.has("no_rope_layers"):
        return tuple(number != 0 for number in fields.numbers("no_rope_layers", num_layers, 0, 1))
    interval = fields.integer("no_rope_layer_interval", 1, 1 << 12, default=4)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
