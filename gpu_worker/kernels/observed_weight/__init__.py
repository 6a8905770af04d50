"""Attention weight that every token of a prefilled layer gets from some of the prompt's own queries."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.kernels.observed_weight import reference

observed_weight = by_device(reference.observed_weight)
