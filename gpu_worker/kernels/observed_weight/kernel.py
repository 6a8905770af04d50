"""Observed weights in Triton, in three launches: softmax sums first, then weights by them, which are never stored.

`split_log_sums`, grid (tiles of queries, H_kv, splits): a program keeps a tile of the queries of a KV head's group and
reads the tokens that any of them sees, or a split of these, once; of each query it leaves the log2 of its softmax sum.
`join_log_sums` joins the splits, and notes which tokens each tile of queries sees. `sum_weights`, grid (tiles of
tokens, H_kv): a program keeps a tile of keys, and computes the scores of the queries that see any of them once more.

Keys are read twice where the queries are few, and cached in the L2 cache where they are many; scores take as many
products as attention, and as many powers of two, which cost as much. No sum is atomic: two runs agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted, num_processors
from gpu_worker.kernels.attention.splits import MAX_SPLITS, num_splits
from gpu_worker.kernels.observed_weight.programs import join_log_sums, split_log_sums, sum_weights

NUM_WARPS = 4
# Programs that memory and registers of an SM are enough for.
PROGRAMS_PER_PROCESSOR = 2
# Tiles of queries whose reach is looked at together.
REACH_TILE = 1024


@dataclass(frozen=True, slots=True)
class _Tiles:
    """kept: queries or tokens that a program holds throughout. met: those it reads at a time. stages: tiles in
    flight."""

    kept: int
    met: int
    stages: int


# Of 16 bits; of float32, which takes three products of TF32; of float32 with more than `MOST_WIDE_DIMS` dimensions.
NARROW = _Tiles(128, 64, 3)
WIDE = _Tiles(64, 32, 2)
WIDEST = _Tiles(32, 32, 1)
MOST_WIDE_DIMS = 128


def observed_weight(
    queries: Tensor, keys: Tensor, positions: Tensor | None, shares: Tensor | None, scale: float
) -> Tensor:
    """See the reference. All on one CUDA device; the queries' and the keys' last strides are 1.

    Raises ValueError where dtypes or layouts differ from these.
    """
    _check(queries, keys, positions, shares)
    num_heads, width, head_dim = queries.shape
    num_kv_heads, num_tokens, _ = keys.shape
    device, group = keys.device, num_heads // num_kv_heads
    if not width:
        return torch.zeros(num_kv_heads, num_tokens, dtype=torch.float32, device=device)
    num_rows, dim_tile = group * width, max(16, triton.next_power_of_2(head_dim))
    tiles = _tiles(queries.dtype, dim_tile)
    most = max(16, triton.next_power_of_2(num_rows))
    kept_rows, met_rows = min(tiles.kept, most), min(tiles.met, most)
    num_kept, num_met = triton.cdiv(num_rows, kept_rows), triton.cdiv(num_rows, met_rows)
    splits = _splits(num_kept * num_kv_heads, triton.cdiv(num_tokens, tiles.met), num_processors(device))
    partial = torch.empty(num_kv_heads, splits, num_rows, dtype=torch.float32, device=device)
    log_sums = torch.empty(num_kv_heads, num_rows, dtype=torch.float32, device=device)
    reach = torch.empty(num_kv_heads, num_met, 2, dtype=torch.int32, device=device)
    observed = torch.empty(num_kv_heads, num_tokens, dtype=torch.float32, device=device)
    position_strides, share_strides = _strides(positions), _strides(shares)
    row_strides = (*queries.stride()[:2], *keys.stride()[:2], *position_strides)
    wide_dot = _is_wide(queries)
    split_log_sums[(num_kept, num_kv_heads, splits)](
        queries, keys, positions, partial, *row_strides, num_tokens, num_rows, scale,
        GROUP=group, HEAD_DIM=head_dim, DIM_TILE=dim_tile, ROWS=kept_rows, TOKENS=tiles.met,
        STAGES=tiles.stages, WIDE_DOT=wide_dot, num_warps=NUM_WARPS,
    )  # fmt: skip
    join_log_sums[(num_met, num_kv_heads)](
        positions, partial, log_sums, reach, *position_strides, num_tokens, num_rows, splits,
        GROUP=group, ROWS=met_rows, SPLITS_TILE=MAX_SPLITS, num_warps=NUM_WARPS,
    )  # fmt: skip
    sum_weights[(triton.cdiv(num_tokens, tiles.kept), num_kv_heads)](
        queries, keys, positions, shares, log_sums, reach, observed, *row_strides, *share_strides,
        num_tokens, num_rows, num_met, scale,
        GROUP=group, HEAD_DIM=head_dim, DIM_TILE=dim_tile, ROWS=met_rows, TOKENS=tiles.kept, REACH_TILE=REACH_TILE,
        STAGES=tiles.stages, WIDE_DOT=wide_dot, num_warps=NUM_WARPS,
    )  # fmt: skip
    return observed


def _tiles(dtype: torch.dtype, dim_tile: int) -> _Tiles:
    if dtype != torch.float32:
        return NARROW
    return WIDE if dim_tile <= MOST_WIDE_DIMS else WIDEST


def _splits(num_programs: int, num_tiles: int, processors: int) -> int:
    """Splits of the tokens: none where the tiles of queries keep all processors busy."""
    if num_programs >= PROGRAMS_PER_PROCESSOR * processors:
        return 1
    return num_splits(num_programs, num_tiles, processors, PROGRAMS_PER_PROCESSOR)


def _is_wide(queries: Tensor) -> bool:
    return queries.dtype == torch.bfloat16 and is_interpreted()


def _strides(of_queries: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if of_queries is None else of_queries.stride()


def _check(queries: Tensor, keys: Tensor, positions: Tensor | None, shares: Tensor | None) -> None:
    if queries.dtype != keys.dtype:
        raise ValueError(f"queries are {queries.dtype} and keys {keys.dtype}; cast one of them")
    if queries.stride(2) != 1 or keys.stride(2) != 1:
        raise ValueError("a query's and a key's elements must lie side by side; make them contiguous")
    if queries.shape[2] != keys.shape[2] or queries.shape[0] % keys.shape[0]:
        raise ValueError(f"queries {tuple(queries.shape)} do not fit keys {tuple(keys.shape)}")
    for name, given, dtype in (("positions", positions, torch.int64), ("shares", shares, torch.float32)):
        if given is not None and given.dtype != dtype:
            raise ValueError(f"give int64 positions and float32 shares, not {name} of {given.dtype}")
        if given is not None and given.shape != queries.shape[:2]:
            raise ValueError(f"{name} {tuple(given.shape)} are not one for each query")
