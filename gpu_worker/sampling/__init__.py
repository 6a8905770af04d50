"""Choosing the next token of every request of a batch."""

from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.state import SamplerState

__all__ = ["Sampler", "SamplerState"]
