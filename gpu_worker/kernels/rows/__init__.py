"""K|V rows between the arena in host memory, the pool of slots and new keys and values."""

from gpu_worker.kernels.rows.reference import (
    ArenaLayout,
    arena_offsets,
    fetch_misses,
    gather_pairs,
    gather_rows,
    scatter_pairs,
    scatter_rows,
)

__all__ = [
    "ArenaLayout",
    "arena_offsets",
    "fetch_misses",
    "gather_pairs",
    "gather_rows",
    "scatter_pairs",
    "scatter_rows",
]
