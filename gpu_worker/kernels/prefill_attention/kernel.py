"""Prefill attention on a GPU, through PyTorch's fused attention, which reads K and V in place, side by side in a row.

cuDNN's is much the fastest, but has no mask for a chunk behind its past, and plans every shape that it has not seen for
tens of milliseconds. So it gets 2 ** i units of queries at a time, by themselves and then 2 ** j units of their past,
all weighed by their softmax sums. The remaining queries go through flash attention, their past in pieces at once where
they alone would leave SMs idle, and themselves with a mask; what that does not support (float32, large heads, old GPUs)
is attended some queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from gpu_worker.kernels.join_pieces import join_past, join_pieces
from gpu_worker.kernels.prefill_attention.reference import MAX_SCORES, Packed, attend_in_pieces
from gpu_worker.row_format import keys_and_values

# Of queries and of past tokens, in what goes to cuDNN.
UNIT = 1024
# Flash attention's heads have a multiple of so many dimensions, and its programs so many queries.
FLASH_DIMS, FLASH_QUERIES = 8, 128
# Two for each of the 132 SMs of an H200, and as many again: the last are done soon.
PROGRAMS = 528
# Tokens of a piece, at least.
LEAST_PIECE = 512


def attend_chunk(query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
    """See the reference."""
    num_tokens, _num_heads, head_dim = query.shape
    grouped = query.transpose(0, 1)[None]
    keys, values = rows[None, :, : begin + num_tokens].split(head_dim, dim=3)
    asked = SDPAParams(grouped, keys, values, None, 0.0, False, True)
    if not can_use_flash_attention(asked):
        return attend_in_pieces(query, rows, begin, scale, MAX_SCORES)
    whole = num_tokens // UNIT * UNIT if can_use_cudnn_attention(asked) else 0
    parts = []
    for piece in _pieces(whole):
        seen = slice(0, begin + piece.stop)
        parts.append(_units(grouped[:, :, piece], keys[:, :, seen], values[:, :, seen], scale))
    if whole < num_tokens:
        rest = grouped[:, :, whole:] if whole else grouped
        parts.append(_few(rest, keys, values, scale))
    attended = [part[0].transpose(0, 1) for part in parts]
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def plan_chunks(query: Tensor, rows: Tensor, scale: float) -> Iterator[None]:
    """See the reference: cuDNN plans whatever it is given of such prompts."""
    head_dim, num_rows = query.shape[2], rows.shape[1]
    grouped = query.transpose(0, 1)[None]
    keys, values = rows[None, :, :, :head_dim], rows[None, :, :, head_dim:]
    asked = SDPAParams(grouped, keys, values, None, 0.0, False, True)
    if not (can_use_flash_attention(asked) and can_use_cudnn_attention(asked)):
        return
    for num_queries in _units_up_to(min(query.shape[0], num_rows)):
        piece = grouped[:, :, :num_queries]
        _cudnn(piece, keys[:, :, :num_queries], values[:, :, :num_queries], scale, is_causal=True)
        yield
        for num_keys in _units_up_to(num_rows - num_queries):
            _cudnn(piece, keys[:, :, :num_keys], values[:, :, :num_keys], scale)
            yield
    # A past of so many units is so many pieces at most, plus the chunk's own; each number of them is compiled.
    for num_pieces in range(2, (num_rows // UNIT).bit_length() + 2):
        log_sums = torch.zeros(num_pieces, query.shape[1], 1, device=query.device)
        join_pieces(log_sums, *[query[:1]] * num_pieces)
    num_kv_heads, own = rows.shape[0], query[:1]
    log_sums = torch.zeros(2, num_kv_heads, query.shape[1] // num_kv_heads, device=query.device)
    outputs = own.reshape(1, -1, num_kv_heads, head_dim).expand(2, -1, -1, -1)
    join_past(log_sums, outputs, log_sums[0].view(-1, 1), own)


def _units_up_to(num_tokens: int) -> Iterator[int]:
    """Powers of two of `UNIT`."""
    size = UNIT
    while size <= num_tokens:
        yield size
        size *= 2


def attend_prompts(query: Tensor, rows: Tensor, packed: Packed, scale: float) -> Tensor:
    """See the reference."""
    head_dim = query.shape[2]
    rows = rows[:, : sum(packed.num_rows)]
    keys, values = rows[..., :head_dim], rows[..., head_dim:]
    if not reads_bounds(query, rows):
        return packed.attend_each(attend_chunk, query, rows, scale)
    attend = torch.ops.aten._flash_attention_forward
    query, keys, values = (_padded(each) for each in (query, keys.transpose(0, 1), values.transpose(0, 1)))
    bounds = packed.query_bounds, packed.row_bounds
    longest = max(packed.num_queries), max(packed.num_rows)
    output, *_ = attend(query, keys, values, *bounds, *longest, 0.0, True, False, scale=scale)
    return output[..., :head_dim]


def reads_bounds(query: Tensor, rows: Tensor) -> bool:
    """See the reference."""
    keys, values = keys_and_values(rows)
    asked = SDPAParams(query.transpose(0, 1)[None], keys[None], values[None], None, 0.0, False, True)
    return bool(can_use_flash_attention(asked))


def _units(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of 2 ** i units of queries, which are of the last keys: pieces of the past without a mask and what is
    left with one, joined in float32."""
    begin = keys.shape[2] - query.shape[2]
    past = begin // UNIT * UNIT
    own_keys, own_values = keys[:, :, past:], values[:, :, past:]
    if past == begin:
        output, log_sum = _cudnn(query, own_keys, own_values, scale, is_causal=True)
    else:
        output, log_sum = _flash(query, own_keys, own_values, scale)
    if not past:
        return output
    of_pieces = [(output, log_sum)]
    for piece in _pieces(past):
        of_pieces.append(_cudnn(query, keys[:, :, piece], values[:, :, piece], scale))
    log_sums = torch.stack([log_sum[0, :, :, 0] for _, log_sum in of_pieces])
    joined = join_pieces(log_sums, *(output[0].transpose(0, 1) for output, _ in of_pieces))
    return joined.transpose(0, 1)[None]


def _few(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of the queries that cuDNN does not get, of the last keys: where they are few, those before them in
    pieces of one length, a batch of which each has all the queries, the others with a mask, joined in float32."""
    num_queries, num_kv_heads = query.shape[2], keys.shape[1]
    past, group = keys.shape[2] - num_queries, query.shape[1] // num_kv_heads
    programs = -(-group * num_queries // FLASH_QUERIES) * num_kv_heads
    num_pieces = min(PROGRAMS // programs, past // LEAST_PIECE)
    if num_pieces < 2:
        return _flash(query, keys, values, scale)[0]
    length = past // num_pieces // FLASH_QUERIES * FLASH_QUERIES
    split = num_pieces * length
    past_keys, past_values = (
        each[0, :, :split].unflatten(1, (num_pieces, length)).transpose(0, 1) for each in (keys, values)
    )
    # Nothing masks the past, so that a group's heads are more queries of the same keys.
    by_head = query.unflatten(1, (num_kv_heads, group)).flatten(2, 3)
    in_pieces = by_head.expand(num_pieces, -1, -1, -1)
    found, sums = _flash(in_pieces, past_keys, past_values, scale, is_causal=False)
    own, own_sum = _flash(query, keys[:, :, split:], values[:, :, split:], scale)
    joined = join_past(sums[..., 0], found.transpose(1, 2), own_sum[0, ..., 0], own[0].transpose(0, 1))
    return joined.transpose(0, 1)[None]


def _pieces(num_tokens: int) -> Iterator[slice]:
    """A multiple of `UNIT` as powers of two of it, the largest first."""
    begin = 0
    while begin < num_tokens:
        units = (num_tokens - begin) // UNIT
        size = UNIT << (units.bit_length() - 1)
        yield slice(begin, begin + size)
        begin += size


def _cudnn(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention [1, H_q, T, d] and, float32 [1, H_q, T, 1], the logarithm of its softmax sums."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    output, log_sum, *_ = attend(query, keys, values, None, True, 0.0, is_causal, False, scale=scale)
    return output, log_sum.reshape(*output.shape[:3], 1)


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, is_causal: bool = True
) -> tuple[Tensor, Tensor]:
    """As `_cudnn`; causal, the last query sees all keys, each one before it one less."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    head_dim = query.shape[3]
    query, keys, values = (_padded(each) for each in (query, keys, values))
    output, log_sum, *_ = attend(query, keys, values, 0.0, is_causal, False, scale=scale)
    return output if output.shape[3] == head_dim else output[..., :head_dim], log_sum[..., None]


def _padded(heads: Tensor) -> Tensor:
    missing = -heads.shape[-1] % FLASH_DIMS
    return F.pad(heads, (0, missing)) if missing else heads
