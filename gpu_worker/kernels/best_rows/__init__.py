"""Which rows of every head score best, ties by a second score."""

from gpu_worker.kernels.best_rows import reference
from gpu_worker.kernels.dispatch import by_device

best_rows = by_device(reference.best_rows)
