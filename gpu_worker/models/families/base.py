"""What the families share: the fields that every config.json of the Llama line has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.errors import ModelError
from gpu_worker.models.config import ModelConfig, RopeConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.rope import ROPE_TYPES

MAX_POSITIONS = 1 << 24
_NEEDED_BY = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True, slots=True)
class Family:
    """A `model_type` and how its config.json becomes a ModelConfig; `read_config` raises ModelError."""

    model_type: str
    read_config: Callable[[ConfigFields], ModelConfig]


def read_common(
    fields: ConfigFields, *, interleaved: bool = False, partial_rotary_factor: float = 1.0
) -> ModelConfig:
    """A plain decoder without biases or extra norms; families `dataclasses.replace` what differs."""
    if fields.has("quantization_config"):
        raise fields.fail("quantization_config", "no quantised weights: give the unquantised model")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.fail("hidden_act", "'silu'")
    hidden_size = fields.integer("hidden_size", 1, 1 << 17)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.fail("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    head_dim = fields.integer("head_dim", 2, 1 << 12, default=hidden_size // num_heads)
    if head_dim % 2:
        raise fields.fail("head_dim", "an even number")
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    max_position_embeddings = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    return ModelConfig(
        model_type=fields.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 20),
        num_layers=fields.integer("num_hidden_layers", 1, 1 << 12),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0),
        rope=_read_rope(fields, head_dim, max_position_embeddings, interleaved, partial_rotary_factor),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        checkpoint_dtype=fields.text("dtype" if fields.has("dtype") else "torch_dtype", "") or None,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
    )


def read_layer_window(fields: ConfigFields) -> int | None:
    """The sliding window of the Qwen families, which hold only where `use_sliding_window` says so."""
    unknown = set(fields.texts("layer_types")) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(
            f"{fields.where}: layer_types {sorted(unknown)} are not supported; only full_attention is"
        )
    if not fields.flag("use_sliding_window", default=False) or not fields.has("sliding_window"):
        return None
    return fields.integer("sliding_window", 1, MAX_POSITIONS)


def _read_rope(
    fields: ConfigFields, head_dim: int, max_positions: int, interleaved: bool, partial_rotary_factor: float
) -> RopeConfig:
    # transformers 5 writes rope_parameters; before, rope_scaling with rope_theta beside it
    settings = fields.object("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    rope_type = settings.choice("rope_type" if settings.has("rope_type") else "type", ROPE_TYPES, "default")
    for name, value in settings.items():
        if isinstance(value, (dict, list)):
            raise settings.fail(
                name, "a single value: RoPE settings that differ between layers are not supported"
            )
    theta = fields.number("rope_theta", 2.0, 1e15, default=10000.0)
    partial = fields.number("partial_rotary_factor", 0.0, 1.0, default=partial_rotary_factor)
    partial = settings.number("partial_rotary_factor", 0.0, 1.0, default=partial)
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"{fields.where}: partial_rotary_factor {partial:g} rotates {rotary_dim} elements "
            f"of a head of {head_dim}; expected an even number from 2"
        )
    for name in _NEEDED_BY.get(rope_type, ()):
        if not settings.has(name):
            raise settings.fail(name, f"a number, which RoPE type {rope_type!r} needs")
    low_freq_factor = settings.number("low_freq_factor", 0.0, 1e6, default=1.0)
    high_freq_factor = settings.number("high_freq_factor", 0.0, 1e6, default=4.0)
    if high_freq_factor <= low_freq_factor:
        raise settings.fail("high_freq_factor", f"more than low_freq_factor, {low_freq_factor:g}")
    return RopeConfig(
        rope_type=rope_type,
        theta=settings.number("rope_theta", 2.0, 1e15, default=theta),
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        factor=settings.number("factor", 1.0, 1e4, default=1.0),
        original_max_position_embeddings=settings.integer(
            "original_max_position_embeddings", 1, MAX_POSITIONS, default=max_positions
        ),
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        beta_fast=settings.number("beta_fast", 1e-6, 1e6, default=32.0),
        beta_slow=settings.number("beta_slow", 1e-6, 1e6, default=1.0),
        mscale=_optional(settings, "mscale"),
        mscale_all_dim=_optional(settings, "mscale_all_dim"),
        attention_factor=_optional(settings, "attention_factor"),
        truncate=settings.flag("truncate", default=True),
    )


def _optional(settings: ConfigFields, name: str) -> float | None:
    return settings.number(name, 0.0, 1e6) if settings.has(name) else None
