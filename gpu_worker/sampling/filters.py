"""Truncation of the distribution: each filter sets the logits of the tokens it removes to -inf.

The vocabulary has one total order: greater logit first, then smaller token id. All filters take [B, V] float32 logits
already divided by the temperature and return new logits of that shape. In top-k and top-p ties fall to the smaller
token id. Every filter keeps each request's greatest logit.
"""

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
    bits = (logits + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    return ordered.bitwise_left_shift_(32).sub_(token_ids)


def first_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Token ids of each row's first k in the order: [B, V] float32 -> [B, k] int64."""
    if k <= 1:
        # of equals the first, as in the order, in a tenth of the time
        return logits.argmax(dim=-1, keepdim=True)[:, :k]
    return order_keys(logits).topk(k, dim=-1).indices


def ranks(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Places of a token of each row in the order, the first 1: [B, V] float32, [B] int64 -> [B] int64."""
    own = token_ids.unsqueeze(-1)
    values = logits.gather(-1, own)
    is_smaller_id = torch.arange(logits.shape[-1], device=logits.device) < own
    return 1 + ((logits > values) | ((logits == values) & is_smaller_id)).count_nonzero(-1)


def keep_top_k(logits: torch.Tensor, k: torch.Tensor, most: int) -> torch.Tensor:
    """Keep exactly the k greatest logits of each row; k: [B] int64 in [1, most]; most: at most V."""
    keys = order_keys(logits)
    greatest = keys.topk(most, dim=-1).values
    threshold = greatest.gather(-1, (k - 1).unsqueeze(-1))
    return logits.masked_fill(keys < threshold, -torch.inf)


def keep_top_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest tokens, likeliest first, whose probabilities reach p, one at least; p: [B] float32 in [0, 1].

    A token stays when the tokens before it have less than p in sum (nucleus sampling, arXiv 1904.09751).
    """
    ordered, token_ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(ordered, dim=-1, dtype=torch.float64)
    before = probabilities.cumsum(dim=-1) - probabilities
    removed = before >= p.double().unsqueeze(-1)
    removed[:, :1].fill_(False)
    return logits.masked_fill(torch.zeros_like(removed).scatter(-1, token_ids, removed), -torch.inf)


def keep_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep tokens at least min_p times as likely as the likeliest; min_p: [B] float32 in [0, 1).

    arXiv 2407.01082.
    """
    threshold = logits.amax(dim=-1) + min_p.log()
    return logits.masked_fill(logits < threshold.unsqueeze(-1), -torch.inf)
