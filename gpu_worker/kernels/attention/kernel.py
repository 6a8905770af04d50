"""Split-K decode attention in Triton: a pass over the attended rows of the pool, and one that joins the splits.

`attend_split`, grid (B * H_kv, splits): a program reads one split of the slots of a (sequence, KV head), each K|V row
once for all query heads of the group, which stand in one tile of at least 16 for `tl.dot`. It leaves the split's
output [group, d] and the log2 of its softmax sum in float32. `join_splits`, grid (B * H_q): a program weighs the
splits of one query head.

Without splits a batch of one would keep 8 of 132 processors busy. How many there are follows from shapes alone, so
that a captured graph holds for any lengths; how long they are follows from the length on the device, so that all
programs share a short sequence in a wide table. Nearly all traffic is the rows; the splits' results are a few percent.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.attention.programs import attend_split, join_splits
from gpu_worker.kernels.attention.reference import BLOCK_SIZE, Rest
from gpu_worker.kernels.attention.splits import MAX_SPLITS, num_splits
from gpu_worker.row_format import row_format

# K|V bytes that a program has in flight, at most.
TILE_BYTES = 32768
# Tiles under way in a program: rows picked one by one want fewer, runs of rows more (measured on an H200).
SLOT_STAGES = 2
BLOCK_STAGES = 3
NUM_WARPS = 4
# Splits that a joining program weighs at a time.
JOIN_TILE = 16
# Of the GPU that the interpreter stands for.
INTERPRETED_PROCESSORS = 132


def attend_slots(
    query: Tensor,
    pool: Tensor,
    fixed: Tensor,
    seats: Tensor,
    selected: Tensor,
    scale: float,
    rest: Rest | None = None,
) -> Tensor:
    """See the reference. All on one CUDA device; the elements of a head and of a slot are contiguous.

    Raises ValueError where the dtypes or layouts differ from these.
    """
    num_fixed = fixed.shape[2]
    lists = _Lists(fixed, seats, selected, None, None, num_fixed, num_fixed + selected.shape[2])
    return _attend(query, pool, lists, SLOT_STAGES, scale, rest)


def attend_blocks(
    query: Tensor,
    pool: Tensor,
    block_tables: Tensor,
    seats: Tensor,
    lengths: Tensor,
    scale: float,
    longest: int,
    bias: Tensor | None = None,
) -> Tensor:
    """See the reference, and `attend_slots`; a captured graph keeps `longest`."""
    capacity = min(block_tables.shape[2] * BLOCK_SIZE, longest)
    lists = _Lists(block_tables, seats, None, lengths, bias, 0, capacity)
    return _attend(query, pool, lists, BLOCK_STAGES, scale)


@dataclass(frozen=True, slots=True)
class _Lists:
    """Where a row's slots are listed: in a seat's table, the first `num_fixed` places, then in the row's own list.

    With `lengths` the table is of blocks. capacity: places at most.
    """

    table: Tensor
    seats: Tensor
    selected: Tensor | None
    lengths: Tensor | None
    bias: Tensor | None
    num_fixed: int
    capacity: int


def _attend(
    query: Tensor, pool: Tensor, lists: _Lists, num_stages: int, scale: float, rest: Rest | None = None
) -> Tensor:
    _check_rows(query, pool)
    _check_lists(lists, query.shape[0])
    batch, num_heads, head_dim = query.shape
    table, selected, lengths, bias = lists.table, lists.selected, lists.lengths, lists.bias
    num_kv_heads, capacity = table.shape[1], lists.capacity
    group = num_heads // num_kv_heads
    dim_tile = max(16, triton.next_power_of_2(head_dim))
    tile = min(BLOCK_SIZE, max(16, TILE_BYTES // (2 * dim_tile * pool.element_size())))
    num_tiles, processors = triton.cdiv(capacity, tile), num_processors(query.device)
    splits = num_splits(batch * num_kv_heads, num_tiles, processors, may_be_shorter=lengths is not None)
    partial = torch.empty(batch * num_kv_heads, splits, group, head_dim, device=query.device)
    partial_lse = torch.empty(batch * num_kv_heads, splits, group, device=query.device)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lengths_strides = (0, 0) if lengths is None else lengths.stride()
    attend_split[(batch * num_kv_heads, splits)](
        query,
        pool,
        table,
        lists.seats,
        selected,
        lengths,
        bias,
        partial,
        partial_lse,
        *query.stride()[:2],
        pool.stride(0),
        *table.stride(),
        *((0, 0, 0) if selected is None else selected.stride()),
        *lengths_strides,
        *((0, 0, 0) if bias is None else bias.stride()),
        lists.num_fixed,
        capacity,
        scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=BLOCK_SIZE,
        GROUP_TILE=max(16, triton.next_power_of_2(group)),
        DIM_TILE=dim_tile,
        TILE=tile,
        WIDE_DOT=query.dtype == torch.bfloat16 and is_interpreted(),
        # Products of float32 are sums of ordinary multiply-adds: 4 warps would not hold their operands.
        num_warps=2 * NUM_WARPS if query.dtype == torch.float32 else NUM_WARPS,
        num_stages=num_stages,
    )
    if rest is not None:
        # Not before: it is computed during the pass over the rows.
        rest.ready()
    join_splits[(batch * num_heads,)](
        partial,
        partial_lse,
        lengths,
        None if rest is None else rest.values,
        None if rest is None else rest.log_weights,
        output,
        *lengths_strides,
        capacity,
        splits,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM_TILE=dim_tile,
        TILE=tile,
        JOIN_TILE=JOIN_TILE,
        # Not as many as there are: it would be compiled anew for every length.
        SPLITS_TILE=MAX_SPLITS,
        num_warps=NUM_WARPS,
    )
    return output


def _check_rows(query: Tensor, pool: Tensor) -> None:
    if query.dtype != pool.dtype:
        raise ValueError(f"query is {query.dtype} and pool {pool.dtype}; cast the query")
    if query.stride(2) != 1 or pool.stride(1) != 1:
        raise ValueError("the elements of a head and of a slot must be contiguous")
    if pool.shape[0] > 2**31 - 1:
        raise ValueError(f"{pool.shape[0]} slots: their ids must be less than 2**31")
    if pool.shape[1] != row_format(query.shape[2], query.dtype).row_elements:
        raise ValueError(f"a slot of {pool.shape[1]} elements is not K|V of {query.shape[2]} each")


def _check_lists(lists: _Lists, batch: int) -> None:
    table, seats, selected, bias = lists.table, lists.seats, lists.selected, lists.bias
    if seats.dtype != torch.int64 or seats.shape != (batch,) or not seats.is_contiguous():
        raise ValueError(f"seats must be {batch} contiguous int64, one for each row of the query")
    if selected is not None and not table.dtype == selected.dtype == torch.int32:
        raise ValueError(f"slots are listed as int32, not as {table.dtype} and {selected.dtype}")
    for of_rows in (selected, lists.lengths):
        if of_rows is not None and of_rows.shape[:2] != (batch, table.shape[1]):
            raise ValueError(f"{tuple(of_rows.shape)} does not fit {batch} rows of {table.shape[1]} KV heads")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape[2] < lists.capacity):
        raise ValueError(f"the bias must be {lists.capacity} float32, it is {bias.shape[2]} {bias.dtype}")


@functools.cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def is_interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)
