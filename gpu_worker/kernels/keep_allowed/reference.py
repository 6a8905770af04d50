"""The definition of masking logits by packed bits, in PyTorch; it is also what a CPU runs."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_allowed(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """Set the logits of the tokens that may not come to -inf, in place. Other rows stay as they are, and so do NaN and
    +inf wherever they are, for whoever looks for them.

    logits: [B, V] float32, contiguous in V. rows: [M] int32, each once. allowed: [M, ceil(V / 32)] int32, contiguous in
    a row: of row `rows[m]` token t is bit t % 32 of word t // 32; bits from V on are ignored.
    """
    bits = 1 << torch.arange(32, dtype=torch.int32, device=logits.device)
    is_removed = allowed.unsqueeze(-1).bitwise_and(bits).eq(0).flatten(1)[:, : logits.shape[1]]
    masked = logits[rows]
    masked.masked_fill_(is_removed & (masked < torch.inf), -torch.inf)
    logits.index_copy_(0, rows.long(), masked)
