"""Attention over pieces of a context, joined by their softmax sums."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.kernels.join_pieces import reference

join_past = by_device(reference.join_past)
join_pieces = by_device(reference.join_pieces)
