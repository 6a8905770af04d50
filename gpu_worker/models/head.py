"""The output projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def project_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Normed hidden states [T, hidden_size] times the head's weight [vocab_size, hidden_size], of the same type: logits
    float32 [T, vocab_size]. On a GPU their sums, which are in float32 in any case, are not rounded to 16 bits: at 25
    bfloat16 has steps of 0.125, and whatever lies closer together would be a tie."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return F.linear(hidden, weight).float()
