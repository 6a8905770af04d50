"""Products with matrices of few bits, which are read as they are stored."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.kernels.packed_matmul import reference
from gpu_worker.kernels.packed_matmul.reference import PackedMatrix

packed_matmul = by_device(reference.packed_matmul)
unpack_rows = by_device(reference.unpack_rows)

__all__ = ["PackedMatrix", "packed_matmul", "unpack_rows"]
