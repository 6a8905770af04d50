"""One total order of the vocabulary: greater logit first, then smaller token id."""

from __future__ import annotations

import torch


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """Distinct keys that sort like (logit, -token id).

    Args:
        logits: [B, V] float32 without NaN; V below 2**31.

    Returns:
        [B, V] int64; the greatest key of a row is its first token in the order.
    """
    # adding zero turns -0.0 into 0.0, which must tie
    bits = (logits + 0.0).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    return (ordered << 32) - token_ids


def first_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Token ids of each row's first k in the order: [B, V] float32 -> [B, k] int64."""
    return order_keys(logits).topk(k, dim=-1).indices
