"""Keys to two bits a coordinate as Triton kernels.

A program rotates a tile of keys by tensor cores, a quarter of the coordinates after the other, so that the bytes of its
codes are four values shifted and added, and no thread needs another's. Keys are read once in their own type; the mean
is subtracted on the way. The difference is rounded to bfloat16, which moves a coordinate near a border between two
codes to its other side, by some thousandths of a step.
"""

from __future__ import annotations

import triton
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted
from gpu_worker.policies.bitkeys.key_bits.programs import code_tokens, code_vectors

# Tokens of a program: of a prompt, whose heads have many, and of all lanes, layers and heads at a step.
PROMPT_TOKENS = 64
STEP_TOKENS = 16


def code_prompt(keys: Tensor, means: Tensor, rotation: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See the reference. All on one CUDA device; keys may have any strides but the last, which is 1, and codes and
    scales be views of one seat and layer."""
    num_heads, num_tokens, head_dim = keys.shape
    if num_heads * num_tokens == 0:
        return
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    code_tokens[(triton.cdiv(num_tokens, PROMPT_TOKENS), num_heads)](
        keys, means.contiguous(), rotation, codes, scales, num_tokens,
        *keys.stride()[:2], *codes.stride()[:2], scales.stride(0),
        **_sizes(head_dim, codes), TOKENS=PROMPT_TOKENS, num_warps=4,
    )  # fmt: skip


def code_leaving(
    keys: Tensor,
    means: Tensor,
    rotation: Tensor,
    codes: Tensor,
    scales: Tensor,
    seats: Tensor,
    positions: Tensor,
) -> None:
    """See the reference. All on one CUDA device; means, codes and scales may be views of some layers."""
    batch, num_layers, num_kv_heads, head_dim = keys.shape
    num_rows = batch * num_layers * num_kv_heads
    if num_rows == 0:
        return
    if keys.stride(3) != 1:
        keys = keys.contiguous()
    code_vectors[(triton.cdiv(num_rows, STEP_TOKENS),)](
        keys, means, rotation, codes, scales, seats.contiguous(), positions.contiguous(),
        num_rows, num_layers, num_kv_heads,
        *keys.stride()[:3], *means.stride()[:3], *codes.stride()[:4], *scales.stride()[:3],
        **_sizes(head_dim, codes), TOKENS=STEP_TOKENS, num_warps=4,
    )  # fmt: skip


def _sizes(head_dim: int, codes: Tensor) -> dict[str, int]:
    """A dot needs 16 of everything."""
    num_bytes = codes.shape[-1]
    return {
        "HEAD_DIM": head_dim,
        "NUM_BYTES": num_bytes,
        "DIMS": max(16, triton.next_power_of_2(head_dim)),
        "BYTES": max(16, triton.next_power_of_2(num_bytes)),
        "IS_PLAIN": is_interpreted(),
    }
