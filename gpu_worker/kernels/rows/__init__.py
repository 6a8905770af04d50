"""K|V rows between the arena in host memory, the pool of slots and new keys and values.

On a GPU the arena is a CUDA tensor, also where it is a view of registered host memory.
"""

from torch import Tensor

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.kernels.rows import reference
from gpu_worker.kernels.rows.reference import ArenaLayout

gather_rows = by_device(reference.gather_rows)
scatter_rows = by_device(reference.scatter_rows)
gather_pairs = by_device(reference.gather_pairs)
scatter_pairs = by_device(reference.scatter_pairs)
keep_rows = by_device(reference.keep_rows, "prompt_kernel")
store_prompt = by_device(reference.store_prompt, "prompt_kernel")
load_prompt = by_device(reference.load_prompt, "prompt_kernel")
store_token = by_device(reference.store_token)
fetch_misses = by_device(reference.fetch_misses, "fetch_kernel")
pool_rows = by_device(reference.pool_rows, "fetch_kernel")
_offsets_by_table = by_device(reference.offsets_by_table, "fetch_kernel")


def arena_offsets(
    layout: ArenaLayout, num_slabs: int, slab_table: Tensor, seats: Tensor, positions: Tensor
) -> Tensor:
    """Where the rows of these positions begin: see `reference.offsets_by_table`."""
    return _offsets_by_table(slab_table, seats, positions, layout, num_slabs)


__all__ = [
    "ArenaLayout",
    "arena_offsets",
    "fetch_misses",
    "gather_pairs",
    "gather_rows",
    "keep_rows",
    "load_prompt",
    "pool_rows",
    "scatter_pairs",
    "scatter_rows",
    "store_prompt",
    "store_token",
]
