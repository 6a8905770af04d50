"""A random index of keys at two bits a coordinate, as BitKeys builds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.base import Setting
from gpu_worker.policies.bitkeys.key_bits import num_code_bytes
from gpu_worker.policies.bitkeys.rotation import Rotation

NUM_SINKS = 4
# of a scale, beside the codes
SCALE_BYTES = 2


@dataclass(frozen=True)
class Coded:
    """Codes and scales of keys, with leading dimensions `heads`, and what coding takes beside the keys."""

    codes: Tensor
    scales: Tensor
    means: Tensor
    rotation: Tensor

    @classmethod
    def random(cls, setting: Setting, *heads: int, num_positions: int) -> Coded:
        head_dim, device = setting.shape.head_dim, setting.device
        size = (*heads, num_positions)
        return cls(
            torch.randint(256, (*size, num_code_bytes(head_dim)), dtype=torch.uint8, device=device),
            torch.rand(size, device=device).half(),
            torch.randn(*heads, head_dim, device=device),
            Rotation.of(head_dim, device).matrix,
        )

    def clone(self) -> Coded:
        return Coded(self.codes.clone(), self.scales.clone(), self.means, self.rotation)


def code_bytes(setting: Setting) -> int:
    """Of a token in one head."""
    return num_code_bytes(setting.shape.head_dim) + SCALE_BYTES
