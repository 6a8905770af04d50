"""The stand-in for candidates that a step does not attend: their summed weight and their mean value."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.policies.bitkeys.bit_rest import reference

fit_values = by_device(reference.fit_values, "fit_kernel")
bit_rest = by_device(reference.bit_rest)
