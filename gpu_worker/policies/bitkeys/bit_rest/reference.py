"""The definition of what stands in for candidates that are not selected, in float32 PyTorch.

Values are fitted on keys by least squares over the prompt's candidates: what is expected of a value moves with its
key's product with the query, as far as the covariance of the two says. A sample of the candidates, by their two-bit
keys, says how much the others weigh and how far their weighted mean product lies from the plain one; that distance is
where the fit is read. (A mean of the values alone is worse than nothing: where much is left out it is not the average
token that has the weight.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_worker.kernels.attention import Rest
from gpu_worker.policies.bitkeys.key_bits.reference import CODE_CENTRE, num_code_bytes

# Candidates that are sampled, at most.
NUM_SAMPLES = 512
# Tokens that are fitted at a time.
FITTED = 8192
# Below what a variance can be that says something.
LEAST_VARIANCE = 1e-6


def fit_values(keys: Tensor, values: Tensor, means: Tensor, value_means: Tensor, slopes: Tensor) -> None:
    """Write what a fit of values on keys needs, in place.

    keys, values: [H_kv, n, d] of the candidates, n > 0. means: float32 [H_kv, d], near the keys' mean. value_means:
    float32 [H_kv, d]. slopes: [H_kv, d, d], the covariance of each coordinate of a key with each of a value; of narrow
    keys products are of bfloat16, whose range they need, and sums of these float32.
    """
    torch.mean(values, dim=1, dtype=torch.float32, out=value_means)
    products: Tensor | None = None
    for some_keys, some_values in zip(keys.split(FITTED, dim=1), values.split(FITTED, dim=1), strict=True):
        # Where keys are centred changes nothing while values are centred at their mean.
        some = torch.bmm(_centred(some_keys, means).mT, _centred(some_values, value_means))
        products = some if products is None else products.float() + some
    assert products is not None
    torch.div(products, keys.shape[1], out=slopes)


def _centred(rows: Tensor, means: Tensor) -> Tensor:
    """[H_kv, n, d] less [H_kv, d], rounded once, to bfloat16 unless they are wider."""
    dtype = torch.float32 if rows.dtype == torch.float32 else torch.bfloat16
    return torch.sub(rows, means[:, None], out=torch.empty(rows.shape, dtype=dtype, device=rows.device))


def bit_rest(
    query: Tensor,
    rotation: Tensor,
    codes: Tensor,
    scales: Tensor,
    means: Tensor,
    value_means: Tensor,
    slopes: Tensor,
    seats: Tensor,
    begin: Tensor,
    end: Tensor,
    selected: Tensor,
    scale: float,
    rest: Rest | None = None,
) -> Rest:
    """Return one row per query head that stands in for the unselected candidates.

    query: [B, H_q, d]. rotation, codes, scales, seats, begin, end: as `bit_score` has them. means, value_means: float32
    [seats, H_kv, d], slopes: [seats, H_kv, d, d], as `fit_values` wrote them. selected: int64 [B, H_kv, K], ascending,
    -1 pads at the end. scale: of the attention. rest: to be written, and returned; else one is made. Where nothing is
    left out the weight is 0.
    """
    num_kv_heads = codes.shape[1]
    grouped = query.float().unflatten(1, (num_kv_heads, -1))
    positions, is_sampled = _samples(begin, end)
    at = positions[:, None].expand(-1, num_kv_heads, -1)
    places = seats[:, None, None], torch.arange(num_kv_heads, device=query.device)[:, None], at
    worth = scales[places].float().where(is_sampled[:, None], 0.0) * scale
    logits = _products(grouped @ rotation.float().T, codes[places]) * worth[:, :, None]
    is_rest = is_sampled[:, None] & ~(at[..., None] == selected[:, :, None]).any(dim=-1)

    top = (
        logits.masked_fill(~is_rest[:, :, None], -math.inf).amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    )
    weights = (logits - top).exp().where(is_rest[:, :, None], 0.0)
    total, number = weights.sum(dim=-1), is_sampled.sum(dim=-1).clamp(min=1)[:, None, None]
    mean = logits.sum(dim=-1) / number
    spread = (logits - mean[..., None]).where(is_sampled[:, None, None], 0.0)
    variance = spread.square().sum(dim=-1) / number
    shift = (weights * spread).sum(dim=-1) / total.where(total > 0, 1.0) / variance.clamp(min=LEAST_VARIANCE)
    fitted = grouped @ slopes[seats].float() * (scale * shift.clamp(-1, 1))[..., None]
    is_there = total > 0
    values = (value_means[seats][:, :, None] + fitted).where(is_there[..., None], 0.0)
    per_sample = (end - begin).clamp(min=1)[:, None, None] / number
    # Codes are of keys less their mean.
    at_mean = (grouped @ means[seats].float()[..., None])[..., 0] * scale
    log_weights = (at_mean + top[..., 0] + (total * per_sample).log()).where(is_there, -math.inf)
    rest = rest or Rest.room(query)
    rest.values.copy_(values.flatten(1, 2))
    rest.log_weights.copy_(log_weights.flatten(1, 2))
    return rest


def _samples(begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Positions int64 [B, NUM_SAMPLES], evenly spaced, and which of them are candidates; those that are none are 0."""
    number = (end - begin).clamp(min=1)
    stride = (number + NUM_SAMPLES - 1) // NUM_SAMPLES
    place = torch.arange(NUM_SAMPLES, device=begin.device) * stride[:, None] + (begin + stride // 2)[:, None]
    is_sampled = place < end[:, None]
    return place.where(is_sampled, 0), is_sampled


def _products(rotated: Tensor, codes: Tensor) -> Tensor:
    """Products of rotated queries [B, H_kv, G, d] with codes [B, H_kv, S, W], in steps: [B, H_kv, G, S]."""
    width = num_code_bytes(rotated.shape[-1])
    products = CODE_CENTRE * rotated.sum(dim=-1, keepdim=True)
    for quarter, some in enumerate(rotated.split(width, dim=-1)):
        values = ((codes << (6 - 2 * quarter)).view(torch.int8) >> 6)[..., : some.shape[-1]]
        products = products + some @ values.float().transpose(-1, -2)
    return products
