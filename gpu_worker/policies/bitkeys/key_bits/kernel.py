"""Keys to two bits a coordinate as Triton kernels.

A program rotates a tile of keys by tensor cores, a quarter of the coordinates after the other, so that the bytes of its
codes are four values shifted and added, and no thread needs another's. Keys are read once in their own type; the mean
is subtracted on the way. The difference is rounded to bfloat16, which moves a coordinate near a border between two
codes to its other side, by some thousandths of a step. The mean is of sums of splits, none of them atomic.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_worker.kernels.attention.kernel import is_interpreted
from gpu_worker.policies.bitkeys.key_bits.programs import code_tokens, code_vectors, sum_keys, write_means

# Tokens at a time: of a prompt, whose heads have many, and of all lanes, layers and heads at a step.
PROMPT_TOKENS = 64
STEP_TOKENS = 16
# Programs that share a prompt: two for each SM of an H200.
PROGRAMS = 264
# The widest heads, of so many bytes, of which shared memory holds the rotation beside keys that come.
WIDEST_HELD = 256
# Sums and sinks at a time.
MEAN_ROWS = 16


def centre(keys: Tensor, means: Tensor, sinks: Tensor) -> None:
    """See the reference. All on one CUDA device; keys and sinks may have any strides but the last, which is 1, and
    means are contiguous."""
    num_heads, num_tokens, head_dim = keys.shape
    if num_heads * num_tokens == 0:
        return
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    assert means.is_contiguous(), "means are written in place"
    assert sinks.shape[1] <= num_tokens, "sinks are tokens of the prompt"
    size, splits = shares(num_heads, num_tokens, PROMPT_TOKENS, PROGRAMS)
    dims, num_sinks = max(16, triton.next_power_of_2(head_dim)), sinks.shape[1]
    sums = torch.empty(num_heads, splits, head_dim, dtype=torch.float32, device=keys.device)
    sum_keys[(splits, num_heads)](
        keys, sums, num_tokens, size, *keys.stride()[:2],
        HEAD_DIM=head_dim, DIMS=dims, TOKENS=PROMPT_TOKENS, num_warps=4,
    )  # fmt: skip
    write_means[(num_heads,)](
        sums, keys, means, sinks, num_tokens, splits, num_sinks, *keys.stride()[:2], *sinks.stride()[:2],
        HEAD_DIM=head_dim, DIMS=dims, ROWS=MEAN_ROWS, num_warps=4,
    )  # fmt: skip


def code_prompt(keys: Tensor, means: Tensor, rotation: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See the reference. All on one CUDA device; keys may have any strides but the last, which is 1, and codes and
    scales be views of one seat and layer."""
    num_heads, num_tokens, head_dim = keys.shape
    if num_heads * num_tokens == 0:
        return
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    size, splits = shares(num_heads, num_tokens, PROMPT_TOKENS, PROGRAMS)
    code_tokens[(splits, num_heads)](
        keys, means.contiguous(), rotation, codes, scales, num_tokens, size,
        *keys.stride()[:2], *codes.stride()[:2], scales.stride(0),
        **_sizes(head_dim, codes), TOKENS=PROMPT_TOKENS,
        IS_HELD=triton.next_power_of_2(head_dim) * keys.element_size() <= WIDEST_HELD, num_warps=4,
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


def shares(num_heads: int, num_tokens: int, tile: int, programs: int) -> tuple[int, int]:
    """Tokens of a program, whole tiles, and programs of a head, where so many programs share all heads."""
    num_tiles = triton.cdiv(num_tokens, tile)
    tiles = triton.cdiv(num_tiles, max(1, programs // num_heads))
    return tiles * tile, triton.cdiv(num_tiles, tiles)


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
