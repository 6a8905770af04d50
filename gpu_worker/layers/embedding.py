"""The matrix of a vocabulary: embedding of tokens, and the output projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.layers.block import Whole


class Embedding(Whole):
    """A row [hidden_size] for each token of the vocabulary."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [T] to hidden states [T, hidden_size]."""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [T, hidden_size] to logits float32 [T, vocab_size]."""
        return project_logits(hidden, self.weight)


def project_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Multiply normed hidden states [T, hidden_size] by `weight` [vocab_size, hidden_size] of the same type: logits
    float32 [T, vocab_size].

    On a GPU their sums, which are in float32 in any case, are not rounded to 16 bits: at 25 bfloat16 has steps of
    0.125, and whatever lies closer together would be a tie.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return F.linear(hidden, weight).float()
