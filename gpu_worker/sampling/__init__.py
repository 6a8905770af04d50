"""Choosing the next token of every request of a batch."""

from gpu_worker.sampling.sampler import Choice, Sampler
from gpu_worker.sampling.state import SamplerState

__all__ = ["Choice", "Sampler", "SamplerState"]
