"""Wrappers: a policy around another, its `inner`, which does everything that the wrapper does not define itself."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

from gpu_worker.policies.base import Plan, Policy
from gpu_worker.policies.retain import Recompression, RetainPolicy

ClassT = TypeVar("ClassT", bound=type[Policy])


def delegating(cls: ClassT) -> ClassT:
    """A class decorator: whatever the class inherits, and does not define itself, is read from `inner`."""
    for name in dir(cls):
        if not name.startswith("_") and name not in vars(cls):
            setattr(cls, name, property(attrgetter(f"inner.{name}")))
    return cls


@delegating
class AllocationPolicy(RetainPolicy):
    """Moves a retain policy's budget: between layers by its own `layer_budget`, or between heads by its own `keep`.

    The one between layers goes outside, `LayerWise(AdaKV(SnapKV()))`: the one between heads needs a policy that scores.
    """

    inner: RetainPolicy

    def recompression(self, plan: Plan) -> Recompression | None:
        # Layers no longer keep equal numbers, nor do heads.
        again = self.inner.recompression(plan)
        return None if again is None else replace(again, together=False)

    # By its own `keep`.
    compress = RetainPolicy.compress
