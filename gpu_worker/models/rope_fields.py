"""The fields of config.json that describe rotary position embedding."""

from __future__ import annotations

from gpu_worker.errors import ModelError
from gpu_worker.layers import RopeSpec
from gpu_worker.layers.rope import ROPE_TYPES
from gpu_worker.models.config_fields import ConfigFields

MAX_POSITIONS = 1 << 24
_NEEDED_BY = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_LISTS = ("short_factor", "long_factor")
# an older name of the same type
_ALIASES = {"su": "longrope"}


def max_model_len(rope: RopeSpec, max_position_embeddings: int) -> int:
    """YaRN stretches the trained length by its factor."""
    if rope.rope_type != "yarn":
        return max_position_embeddings
    return max(max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))


def read_rope(
    fields: ConfigFields, head_dim: int, *, interleaved: bool, partial_rotary_factor: float, theta: float
) -> RopeSpec:
    """Read and check the settings of RoPE. Raises ModelError.

    partial_rotary_factor, theta: the family's, where config.json says nothing.
    """
    # transformers 5 writes rope_parameters; before, rope_scaling with rope_theta next to it
    settings = fields.object("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    type_field = "rope_type" if settings.has("rope_type") else "type"
    rope_type = settings.choice(type_field, (*ROPE_TYPES, *_ALIASES), "default")
    for name, value in settings.items():
        if isinstance(value, (dict, list)) and name not in _LISTS:
            raise settings.fail(
                name, "a single value: RoPE settings that differ between layers are not supported"
            )
    theta = fields.number("rope_theta", 2.0, 1e15, default=theta)
    rotary_dim = _rotary_dim(fields, settings, head_dim, partial_rotary_factor)
    for name in _NEEDED_BY.get(rope_type, ()):
        if not settings.has(name):
            raise settings.fail(name, f"a number, which RoPE type {rope_type!r} needs")
    low_freq_factor = settings.number("low_freq_factor", 0.0, 1e6, default=1.0)
    high_freq_factor = settings.number("high_freq_factor", 0.0, 1e6, default=4.0)
    if high_freq_factor <= low_freq_factor:
        raise settings.fail("high_freq_factor", f"more than low_freq_factor, {low_freq_factor:g}")
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    original = settings.integer("original_max_position_embeddings", 2, MAX_POSITIONS, default=max_positions)
    # where Phi has it, it wins over the settings
    original = fields.integer("original_max_position_embeddings", 2, MAX_POSITIONS, default=original)
    is_long = _ALIASES.get(rope_type, rope_type) == "longrope"
    return RopeSpec(
        rope_type=_ALIASES.get(rope_type, rope_type),
        theta=settings.number("rope_theta", 2.0, 1e15, default=theta),
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        factor=settings.number(
            "factor", 1.0, 1e4, default=max(1.0, max_positions / original) if is_long else 1.0
        ),
        original_max_position_embeddings=original,
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        beta_fast=settings.number("beta_fast", 1e-6, 1e6, default=32.0),
        beta_slow=settings.number("beta_slow", 1e-6, 1e6, default=1.0),
        mscale=_optional(settings, "mscale"),
        mscale_all_dim=_optional(settings, "mscale_all_dim"),
        attention_factor=_optional(settings, "attention_factor"),
        truncate=settings.flag("truncate", default=True),
        short_factors=settings.numbers("short_factor", rotary_dim // 2, 1e-6, 1e6) if is_long else (),
        long_factors=settings.numbers("long_factor", rotary_dim // 2, 1e-6, 1e6) if is_long else (),
    )


def _rotary_dim(fields: ConfigFields, settings: ConfigFields, head_dim: int, default: float) -> int:
    partial = fields.number("partial_rotary_factor", 0.0, 1.0, default=default)
    partial = settings.number("partial_rotary_factor", 0.0, 1.0, default=partial)
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"{fields.where}: partial_rotary_factor {partial:g} rotates {rotary_dim} elements "
            f"of a head of {head_dim}; expected an even number from 2"
        )
    return rotary_dim


def _optional(settings: ConfigFields, name: str) -> float | None:
    return settings.number(name, 0.0, 1e6) if settings.has(name) else None
