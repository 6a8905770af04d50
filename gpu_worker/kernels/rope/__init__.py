"""Rotary position embedding of a fused projection's queries and keys, their norms included."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.kernels.rope import reference

rope = by_device(reference.rope)
