"""The gate of an MLP: SiLU of one half times the other."""

from gpu_worker.kernels.silu_mul.reference import silu_mul

__all__ = ["silu_mul"]
