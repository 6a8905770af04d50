"""What the host knows of a layer that is compressed, so that it need not ask the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """counts: rows that each KV head kept when the layer was last compressed. room: slots of a head for what is decoded
    since. rounds, history: what the policy said of the layer then."""

    counts: tuple[int, ...]
    room: int
    rounds: int
    history: Tensor | None

    def lengths(self, num_decoded: int) -> list[int]:
        """Slots that each head has filled, so many decoded tokens later."""
        grown = min(num_decoded, self.room)
        return [count + grown for count in self.counts]
