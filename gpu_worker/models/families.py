"""Model families by `model_type`: how each reads its config.json. To add one: a function here, and a line in FAMILIES.

What they share is `read_common`: the fields that every config.json of the Llama line has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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


def read_llama(fields: ConfigFields) -> ModelConfig:
    """Llama 2 and 3.x, and the many models that use its architecture by name."""
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        read_common(fields),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


def read_mistral(fields: ConfigFields) -> ModelConfig:
    """Mistral 7B v0.1 to v0.3 and its relatives: v0.1 slides in every layer; later versions write null."""
    window = fields.integer("sliding_window", 1, MAX_POSITIONS) if fields.has("sliding_window") else None
    return replace(read_common(fields), sliding_window=window)


def read_qwen2(fields: ConfigFields) -> ModelConfig:
    """Qwen 2 and 2.5: biases on queries, keys and values."""
    return replace(read_common(fields), qkv_bias=True, sliding_window=_read_layer_window(fields))


def read_qwen3(fields: ConfigFields) -> ModelConfig:
    """Qwen 3 (dense): RMSNorm on each head's query and key."""
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        read_common(fields),
        qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        sliding_window=_read_layer_window(fields),
    )


def read_glm(fields: ConfigFields) -> ModelConfig:
    """GLM-4-9B (2024) in its transformers form: half of each head rotates, in interleaved pairs."""
    return replace(
        read_common(fields, interleaved=True, partial_rotary_factor=0.5),
        qkv_bias=fields.flag("attention_bias", default=True),
        fused_gate_up=True,
    )


def read_glm4(fields: ConfigFields) -> ModelConfig:
    """GLM-4-0414: a norm after each block too."""
    return replace(read_glm(fields), post_norms=True)


FAMILIES: dict[str, Callable[[ConfigFields], ModelConfig]] = {
    "llama": read_llama,
    "mistral": read_mistral,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "glm": read_glm,
    "glm4": read_glm4,
}


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


def _read_layer_window(fields: ConfigFields) -> int | None:
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
