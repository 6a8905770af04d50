"""Scoring and selection in one: the best candidates by keys at two bits a coordinate."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.policies.bitkeys.bit_select import reference

bit_select = by_device(reference.bit_select)
