"""Softmax weights of a decode step over the slots of a block table."""

from gpu_worker.kernels.slot_weights.reference import slot_weights

__all__ = ["slot_weights"]
