"""The same on a GPU, through PyTorch's fused attention, which reads K and V where they lie, side by side in a row.

cuDNN's has no mask for a chunk behind its past, but is much the fastest without one: the past and the chunk are two
calls, whose results are weighed by their softmax sums (599 against 345 TFLOP/s of flash attention with the mask, 8192
queries behind 122880 keys on an H200). What cuDNN does not take goes through flash attention; what that does not take
either (float32, large heads, old GPUs) is attended in pieces.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right

from gpu_worker.kernels.prefill_attention.pieces import MAX_SCORES, attend_in_pieces


def attend_chunk(query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
    """See the reference."""
    num_tokens, _num_heads, head_dim = query.shape
    end = begin + num_tokens
    grouped = query.transpose(0, 1)[None]
    keys, values = rows[None, :, :end, :head_dim], rows[None, :, :end, head_dim:]
    asked = SDPAParams(grouped, keys, values, None, 0.0, False, True)
    if begin > 0 and num_tokens > 1 and can_use_cudnn_attention(asked):
        output = _past_and_chunk(grouped, keys, values, begin, scale)
    elif can_use_flash_attention(asked):
        mask = causal_lower_right(num_tokens, end)
        output = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
    else:
        return attend_in_pieces(query, rows, begin, scale, MAX_SCORES)
    return output[0].transpose(0, 1)


def _past_and_chunk(query: Tensor, keys: Tensor, values: Tensor, begin: int, scale: float) -> Tensor:
    """Two calls, one without a mask and one with the plain causal one, joined in float32."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention

    def half(part: slice, is_causal: bool) -> tuple[Tensor, Tensor]:
        output, lse, *_ = attend(
            query, keys[:, :, part], values[:, :, part], None, True, 0.0, is_causal, False, scale=scale
        )
        return output, lse.reshape(*output.shape[:3], 1)

    past, past_lse = half(slice(0, begin), is_causal=False)
    chunk, chunk_lse = half(slice(begin, None), is_causal=True)
    return torch.lerp(chunk.float(), past.float(), torch.sigmoid(past_lse - chunk_lse)).to(query.dtype)
