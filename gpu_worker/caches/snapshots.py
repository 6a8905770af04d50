"""Snapshots of what a sequence attended in the last step, read from what the step left behind."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from gpu_worker.state.batch import GroupShape

# Slots or selected tokens of all layers and heads that are looked at together: their indices are int64 for a moment.
MAX_ELEMENTS = 1 << 20

One = TypeVar("One")


@dataclass(frozen=True, slots=True)
class LanePlace:
    """Where a sequence stood in the last step: its group's shape and first lane, and its own lane within the group."""

    shape: GroupShape
    first_lane: int
    lane: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tokens attended in the observed layers, `layers`, ascending: L of them.

    attended: positions other than sinks and window, int64 or int32 [L, H_kv, A] on the device, -1 pads; None: every
    token is attended.
    on_device: positions that have a slot, alike; None: every token has one.
    has_fixed: sinks and window, the new token included, are attended.
    """

    layers: tuple[int, ...]
    attended: Tensor | None = None
    on_device: Tensor | None = None
    has_fixed: bool = False


def spread(ones: Ordered[One], most: int) -> list[One]:
    """At most so many of these, evenly, the first among them."""
    count = max(0, min(len(ones), most))
    return [ones[place * len(ones) // count] for place in range(count)]
