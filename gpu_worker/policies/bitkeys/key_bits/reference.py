"""The definition of keys at two bits a coordinate, in float32 PyTorch.

A key less the mean is rotated to x. Its coordinates are measured in steps of STEP times their root mean square, and
each becomes the nearest of -1.5, -0.5, 0.5 and 1.5 steps: codes -2 to 1. The scale says what a step of the values c is
worth, |x|^2 / <x, c>, so that scale * <c, x> is |x|^2, and the error of a product has no side that it prefers
(RaBitQ's estimator).

Byte j of a key's W = ceil(d / 4) holds the coordinates j, j + W, j + 2 W and j + 3 W from its lowest bits up, so that
one shift to the left and one mask bring out W adjacent coordinates, 64-fold, as two's complement has them; where the
last are none their bits are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Of a normal coordinate four values this far apart, in standard deviations, lose the least.
STEP = 0.9957
# What a coordinate is above its code, in steps.
CODE_CENTRE = 0.5
LARGEST_SCALE = 65504.0

# An index has space for whole tiles of so many positions: kernels need mask nothing that they read of it.
TILE = 512


def num_code_bytes(head_dim: int) -> int:
    """W, the bytes of a key's codes."""
    return -(-head_dim // 4)


def padded_length(length: int) -> int:
    """Positions of an index for so many tokens."""
    return -(-length // TILE) * TILE


def centre(keys: Tensor, means: Tensor, sinks: Tensor) -> None:
    """Write the mean of every KV head's keys, and the keys of its first S tokens less it, in place.

    keys: [H_kv, n, d]. means: float32 [H_kv, d]. sinks: float32 [H_kv, S, d], S <= n.
    """
    torch.mean(keys, dim=1, dtype=torch.float32, out=means)
    torch.sub(keys[:, : sinks.shape[1]], means[:, None], out=sinks)


def code_prompt(keys: Tensor, means: Tensor, rotation: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write codes and scales of the first n tokens of every KV head, in place.

    keys: [H_kv, n, d]. means: float32 [H_kv, d]. rotation: bfloat16 [d, d]. codes: uint8 [H_kv, N, W], by position.
    scales: float16 [H_kv, N].
    """
    num_tokens = keys.shape[1]
    codes[:, :num_tokens], scales[:, :num_tokens] = _coded(keys.float() - means[:, None], rotation)


def code_leaving(
    keys: Tensor,
    means: Tensor,
    rotation: Tensor,
    codes: Tensor,
    scales: Tensor,
    seats: Tensor,
    positions: Tensor,
) -> None:
    """Write codes and scales of one token a lane in every layer and KV head, in place.

    keys: [B, L, H_kv, d]. means: float32 [seats, L, H_kv, d]. rotation: bfloat16 [d, d]. codes: uint8
    [seats, L, H_kv, N, W], by position. scales: float16 [seats, L, H_kv, N]. seats: int64 [B]. positions: int64 [B];
    -1: the lane has no token. Lanes with a token have different seats.
    """
    present = (positions >= 0).nonzero()[:, 0]
    seats, positions = seats[present], positions[present]
    found, worth = _coded(keys[present].float() - means[seats], rotation)
    codes[seats, :, :, positions] = found
    scales[seats, :, :, positions] = worth


def _coded(centred: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., W] and scales float16 [...] of vectors float32 [..., d]; of a zero vector the scale is 0."""
    rotated = centred @ rotation.float().T
    square = rotated.square().sum(dim=-1)
    step = STEP * (square / rotated.shape[-1]).sqrt()
    steps = rotated / step.where(step > 0, 1.0)[..., None]
    code = steps.floor().clamp(-2, 1)
    product = (rotated * (code + CODE_CENTRE)).sum(dim=-1)
    worth = square / product.where(product > 0, 1.0)
    width = num_code_bytes(rotated.shape[-1])
    quarters = torch.nn.functional.pad(code % 4, (0, 4 * width - code.shape[-1])).unflatten(-1, (4, width))
    shifts = 4.0 ** torch.arange(4, device=code.device)
    packed = (quarters * shifts[:, None]).sum(dim=-2)
    return packed.to(torch.uint8), worth.clamp(max=LARGEST_SCALE).half()
