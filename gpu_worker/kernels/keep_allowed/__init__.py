"""A grammar's mask on the logits of the answers that it holds."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.kernels.keep_allowed import reference

keep_allowed = by_device(reference.keep_allowed)
