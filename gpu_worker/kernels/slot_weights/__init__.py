"""Softmax weights of a decode step over the slots of a block table."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.kernels.slot_weights import reference

slot_weights = by_device(reference.slot_weights)
