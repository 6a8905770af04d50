"""Rotary position embedding (RoFormer, arXiv:2104.09864) and the ways to stretch it to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from gpu_worker.layers.block import Target


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: the first `rotary_dim` elements of each head turn by position.

    `interleaved` pairs neighbours (0, 1), (2, 3), ...; otherwise element i pairs with i + rotary_dim / 2. The
    fields after `factor` matter only to the types that use them; `attention_factor` None means the type's own
    default. `query_growth` g multiplies queries by 1 + g * ln(1 + floor(position / original_max_position_embeddings)).
    `frequency_factors`, one for each frequency or none, divide them first, whatever the type. `for_length` makes them
    of `long_factors` or `short_factors`, where there are any.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    interleaved: bool = False
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    query_growth: float = 0.0
    frequency_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def for_length(self, max_len: int) -> RopeSpec:
        """Choose the factors of a server whose longest context this is: the long ones above the original length."""
        if not self.long_factors:
            return self
        is_long = max_len > self.original_max_position_embeddings
        chosen = self.long_factors if is_long else self.short_factors
        return replace(self, frequency_factors=chosen, short_factors=(), long_factors=())


class Rope(torch.nn.Module):
    """The table of a RopeSpec, which layers share; None turns by nothing. Never part of the weights."""

    table: torch.Tensor
    query_scale: torch.Tensor | None

    def __init__(self, spec: RopeSpec | None, num_positions: int, target: Target) -> None:
        super().__init__()
        self.interleaved = spec is not None and spec.interleaved
        # without RoPE all positions are squeezed to 0
        spec = spec or RopeSpec("linear", 1.0, 2, factor=math.inf)
        table = rope_table(spec, num_positions, target.device, target.dtype)
        self.register_buffer("table", table, persistent=False)
        growth = query_growth(spec, num_positions, target) if spec.query_growth else None
        self.register_buffer("query_scale", growth, persistent=False)

    def scale_queries(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Multiply queries [T, H, d] by the factors of their positions, where the spec has any."""
        if self.query_scale is None:
            return queries
        return queries * self.query_scale.index_select(0, positions)[:, None, None]


# rope -> (inverse frequencies float32 [rotary_dim / 2], factor on cos and sin)
Frequencies = Callable[[RopeSpec], tuple[torch.Tensor, float]]


def rope_table(rope: RopeSpec, num_positions: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and signed sines by position: `dtype` [num_positions, 2, rotary_dim], computed in float32.

    The sine carries the sign of the rotation, so that turning a head is `x * cos + partner(x) * sin`.
    """
    inv_freq, scale = ROPE_TYPES[rope.rope_type](rope)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inv_freq.to(device))
    cos, sin = angles.cos() * scale, angles.sin() * scale
    if rope.interleaved:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return torch.stack((cos, sin), 1).to(dtype)


def query_growth(rope: RopeSpec, num_positions: int, target: Target) -> torch.Tensor:
    """Return the factor on queries by position: [num_positions] of the target's type, computed in float32."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=target.device)
    steps = torch.floor(positions / rope.original_max_position_embeddings)
    return (1 + rope.query_growth * torch.log(1 + steps)).to(target.dtype)


def _default(rope: RopeSpec) -> tuple[torch.Tensor, float]:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    return inv_freq / torch.tensor(rope.frequency_factors) if rope.frequency_factors else inv_freq, 1.0


def _linear(rope: RopeSpec) -> tuple[torch.Tensor, float]:
    """Position interpolation (arXiv:2306.15595)."""
    return _default(rope)[0] / rope.factor, 1.0


def _llama3(rope: RopeSpec) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, those between blended."""
    inv_freq = _default(rope)[0]
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * inv_freq / rope.factor + keep * inv_freq, 1.0


def _yarn(rope: RopeSpec) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv:2309.00071): interpolation by a ramp over dimensions, and a temperature on attention."""
    inv_freq = _default(rope)[0]

    def dim_of(num_turns: float) -> float:
        length = rope.original_max_position_embeddings
        return rope.rotary_dim * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    interpolate = ramp.clamp(0.0, 1.0)
    inv_freq = interpolate * inv_freq / rope.factor + (1 - interpolate) * inv_freq
    return inv_freq, _yarn_attention_factor(rope)


def _longrope(rope: RopeSpec) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv:2402.13753): a factor for each frequency, and a temperature on attention."""
    scale = rope.attention_factor
    if scale is None:
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
    return _default(rope)[0], scale


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


ROPE_TYPES: dict[str, Frequencies] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    # dynamic NTK changes nothing up to max_position_embeddings, which is as far as we go
    "dynamic": _default,
}
