"""Allocations: wrappers that move a retain policy's budget between layers or heads."""

from gpu_worker.policies.allocation.adakv import AdaKV
from gpu_worker.policies.allocation.base import AllocationPolicy
from gpu_worker.policies.allocation.layerwise import LayerWise
from gpu_worker.policies.allocation.outlier_heads import OutlierHeads

__all__ = ["AdaKV", "AllocationPolicy", "LayerWise", "OutlierHeads"]
