"""The definition of scoring by keys at two bits a coordinate, in float32 PyTorch.

A query is rotated as the keys were and rounded to 8 bits, so that its products with codes are of integers. Its heads'
weights must be comparable to be summed over a group: each is divided by what the head's softmax sums to over the sinks,
exactly, and over the candidates, by a sample of them. (What the mean of the keys adds is the same for all of them.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_worker.kernels.top_k.reference import outside
from gpu_worker.policies.bitkeys.key_bits.reference import CODE_CENTRE, num_code_bytes

LOG2_E = math.log2(math.e)
# Of a rounded query, either way.
LARGEST = 127
# Candidates that are sampled, at most.
NUM_SAMPLES = 512
# A level is what is left of a weight's float32 without its low bits: 8 an octave, in seven bits. Of k tokens that are
# taken of a group of G heads, whose weights sum to G, the lightest weighs G / k at most. Weights up to four times that
# are distinguished, and down to 2^-13 of it.
LEVEL_SHIFT = 20
OCTAVE = 1 << 23 - LEVEL_SHIFT
LEVELS_ABOVE = 2 * OCTAVE
MAX_LEVEL = 127
MIN_LEVEL = 1
# Of a float32.
EXPONENT_OF_ONE = 127


def bit_score(
    query: Tensor,
    rotation: Tensor,
    codes: Tensor,
    scales: Tensor,
    sinks: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    scale: float,
    num_positions: int,
) -> Tensor:
    """Approximate softmax weight of every candidate among sinks and candidates, summed over each GQA group.

    query: [B, H_q, d]. rotation: bfloat16 [d, d]. codes: uint8 [seats, H_kv, N, W]; scales: float16 [seats, H_kv, N],
    by position, as `key_bits` has them. sinks: float32 [seats, H_kv, S, d], the keys at the positions below `begin`, of
    which there are at most S, less the mean. seats: int64 [B], the seat of each row. begin, end: int64 [B], the
    candidates' positions. num_positions: at most N. Returns float32 [B, H_kv, num_positions]; -inf beyond the
    candidates.
    """
    masked = outside(num_positions, begin, end)[:, None]
    num_kv_heads = codes.shape[1]
    grouped, scale = query.float().unflatten(1, (num_kv_heads, -1)), scale * LOG2_E
    # What is no candidate may hold anything.
    codes = codes[seats, :, :num_positions]
    worth = scales[seats, :, :num_positions].float().masked_fill(masked, 0.0) * scale
    logits = _products(grouped @ rotation.float().T, codes) * worth[:, :, None]
    logits = logits.masked_fill_(masked[:, :, None], -math.inf)
    of_sinks = _sink_logits(grouped, sinks[seats], begin) * scale
    sampled, per_sample = _sampled(begin, end, num_positions)
    chosen = logits.masked_fill(~sampled[:, None, None], -math.inf)
    peak = of_sinks.amax(dim=-1).maximum(chosen.amax(dim=-1)).nan_to_num(neginf=0.0)[..., None]
    total = (of_sinks - peak).exp2_().sum(dim=-1)
    total += (chosen - peak).exp2_().sum(dim=-1) * per_sample[:, None, None]
    normaliser = peak + total.log2()[..., None]
    return (logits - normaliser).exp2_().sum(dim=2).masked_fill_(masked, -math.inf)


def levels(weights: Tensor, counts: Tensor, group: int) -> Tensor:
    """Return the float32 levels by which `counts[b]` tokens are selected; -inf where there is no candidate.

    weights: as `bit_score` returns them, of a group of so many query heads. counts: int64 [B].
    """
    # Added, the leading bits of two floats are those of their product, but for less than a level.
    of_counts = counts.to(torch.float32).view(torch.int32) >> LEVEL_SHIFT
    rounded = (weights.view(torch.int32) >> LEVEL_SHIFT) + of_counts[:, None, None] - level_base(group)
    return rounded.clamp_(MIN_LEVEL, MAX_LEVEL).float().masked_fill_(weights == -math.inf, -math.inf)


def level_base(group: int) -> int:
    """Return the base that is subtracted from the leading bits of a weight and of the number of tokens taken."""
    of_group = EXPONENT_OF_ONE + (group - 1).bit_length()
    return (EXPONENT_OF_ONE + of_group) * OCTAVE + LEVELS_ABOVE - MAX_LEVEL


def _products(rotated: Tensor, codes: Tensor) -> Tensor:
    """Products of rounded queries [B, H_kv, G, d] with codes [B, H_kv, N, W], in steps: [B, H_kv, G, N]."""
    unit = rotated.abs().amax(dim=-1, keepdim=True) / LARGEST
    rounded = (rotated / unit.where(unit > 0, 1.0) + 0.5).floor()
    width = num_code_bytes(rotated.shape[-1])
    products = CODE_CENTRE * rounded.sum(dim=-1, keepdim=True)
    for quarter, some in enumerate(rounded.split(width, dim=-1)):
        values = ((codes << (6 - 2 * quarter)).view(torch.int8) >> 6)[..., : some.shape[-1]]
        products = products + some @ values.float().transpose(-1, -2)
    return products * unit


def _sink_logits(grouped: Tensor, sinks: Tensor, begin: Tensor) -> Tensor:
    """Return the logits of the keys below `begin`: [B, H_kv, G, S], -inf where there is none."""
    absent = torch.arange(sinks.shape[2], device=begin.device) >= begin[:, None]
    products = grouped @ sinks.masked_fill(absent[:, None, :, None], 0.0).transpose(-1, -2)
    return products.masked_fill(absent[:, None, None], -math.inf)


def _sampled(begin: Tensor, end: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
    """Which positions are sampled, bool [B, N], and how many candidates each of them stands for, float32 [B].

    They are evenly spaced, the first half a stride behind `begin`.
    """
    number = (end - begin).clamp(min=1)
    stride = (number + NUM_SAMPLES - 1) // NUM_SAMPLES
    place = torch.arange(num_positions, device=begin.device) - (begin + stride // 2)[:, None]
    sampled = (place >= 0) & (place % stride[:, None] == 0) & ~outside(num_positions, begin, end)
    return sampled, number / sampled.sum(dim=-1).clamp(min=1)
