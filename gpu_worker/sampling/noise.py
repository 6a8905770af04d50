"""Randomness that depends on a request and its position alone."""

from __future__ import annotations

import hashlib
import struct

import torch

WEIGHT_SCALE = 2.0**40


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same seed and counter (both uint64)."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, counter), digest_size=8, person=b"carrel.sample")
    return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token of each row's softmax by inverting its distribution function.

    The sums are exact, as weights are whole multiples of 2**-40 of the row's greatest, so that the token does
    not depend on the order of summation. Tokens less likely than that against the likeliest are never drawn.

    Args:
        logits: [B, V] float32; -inf removes a token; the greatest of a row is finite.
        uniforms: [B] float64 in [0, 1).

    Returns:
        [B] int64 token ids.
    """
    relative = torch.exp((logits - logits.amax(dim=-1, keepdim=True)).double())
    bounds = (relative * WEIGHT_SCALE).long().cumsum(dim=-1)
    total = bounds[:, -1]
    targets = torch.minimum((uniforms * total.double()).long(), total - 1)
    return torch.searchsorted(bounds, targets.unsqueeze(-1), right=True).squeeze(-1)
