"""Rows as numbers of 8 bits, for products of many rows."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.kernels.quantise_rows import reference

quantise_rows = by_device(reference.quantise_rows)
