"""The sinks' keys, which move on with the window where positions are those in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.models import KeyShift
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.retain import KeptStep


@dataclass(frozen=True, slots=True)
class SinkKeys:
    """keys: [seats, L, H_kv, s, d], of the first slots, at their positions in the text. key_shift: by the model's
    rotation."""

    keys: Tensor
    key_shift: KeyShift | None

    @classmethod
    def of(cls, shape: CacheShape, num_sink: int) -> SinkKeys:
        return cls(shape.seated(num_sink, shape.head_dim, dtype=shape.dtype), shape.key_shift)

    def fill(self, seat: int, layer: int, keys: Tensor) -> None:
        """Of a prefilled layer, [H_kv, n, d]."""
        sinks = keys[:, : self.keys.shape[3]]
        self.keys[seat, layer, :, : sinks.shape[1]] = sinks

    def turn(self, step: KeptStep) -> None:
        """Turn them on to where the window begins, by as many positions as are gone: the query finds all that is kept
        at neighbouring positions."""
        keys = self.keys[:, step.layers.start : step.layers.stop][step.seats]
        gone = step.positions[:, None, None] + 1 - step.lengths
        assert self.key_shift is not None, "the engine's shape has the model's rotation"
        turned = self.key_shift.apply(keys, gone[..., None])
        # Where a row has fewer sinks its first one is written again.
        every = torch.arange(keys.shape[3], device=keys.device)
        slots = every.where(every < step.begin[:, None], 0)[:, None, None].expand(keys.shape[:-1])
        step.write_keys(slots, turned.gather(3, slots[..., None].expand_as(turned)))
