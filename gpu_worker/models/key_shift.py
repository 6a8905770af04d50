"""Moves rotated keys to other positions: rotations compose, so no unrotated key is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.models.config import RopeConfig
from gpu_worker.models.rope import ROPE_TYPES


@dataclass(frozen=True, slots=True)
class KeyShift:
    """inv_freq: float64 [rotary_dim / 2], radians a position, on the keys' device. interleaved: as in RopeConfig."""

    inv_freq: Tensor
    interleaved: bool

    @classmethod
    def of(cls, rope: RopeConfig, device: torch.device) -> KeyShift:
        # The factor on cosines and sines, where there is one, is in the keys already.
        inv_freq, _factor = ROPE_TYPES[rope.rope_type](rope)
        return cls(inv_freq.double().to(device), rope.interleaved)

    def apply(self, keys: Tensor, distance: Tensor) -> Tensor:
        """Keys [..., d] as if they stood `distance` positions later, int64, one number a key or what broadcasts."""
        angles = distance[..., None] * self.inv_freq
        cos, sin = angles.cos().float(), angles.sin().float()
        rotary_dim = 2 * self.inv_freq.shape[0]
        rotary, rest = keys[..., :rotary_dim].float(), keys[..., rotary_dim:]
        # Pairs that turn together, side by side or half a head apart.
        pairs = rotary.unflatten(-1, (-1, 2) if self.interleaved else (2, -1))
        left, right = pairs.unbind(-1 if self.interleaved else -2)
        turned = (left * cos - right * sin, right * cos + left * sin)
        joined = torch.stack(turned, -1 if self.interleaved else -2).flatten(-2)
        return torch.cat([joined.to(keys.dtype), rest], -1)
