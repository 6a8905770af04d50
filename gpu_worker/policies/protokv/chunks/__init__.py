"""Keys in chunks of consecutive tokens: how far each turns away from its chunk's mean, and the chunks' sums."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.policies.protokv.chunks import reference

irregularity = by_device(reference.irregularity)
chunk_sums = by_device(reference.chunk_sums)
