"""Layer-wise allocation: PyramidKV's schedule for any retain policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gpu_worker.policies.base import Plan
from gpu_worker.policies.hyper_parameters import Between
from gpu_worker.policies.pyramidkv.policy import pyramid_budget
from gpu_worker.policies.retain import RetainPolicy
from gpu_worker.policies.wrapper import AllocationPolicy


@dataclass(frozen=True, slots=True)
class LayerWise(AllocationPolicy):
    """Budgets that fall from layer to layer (Cai et al., PyramidKV, section 4).

    Also the allocator that ProtoKV is combined with (PK-A4). Sinks and window stay as planned in every layer.

    inner: the policy, or `AdaKV` around one; a schedule of its own is replaced. beta: the mean layer selects so many
    times what the last one does.
    """

    inner: RetainPolicy
    beta: Annotated[float, Between(1, 1000)] = 20

    @property
    def name(self) -> str:
        return f"{self.inner.name}+layerwise"

    def layer_budget(self, plan: Plan, layer: int, num_layers: int) -> int:
        return pyramid_budget(plan, layer, num_layers, self.beta)
