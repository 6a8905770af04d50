"""The matrix of a vocabulary: embedding of tokens, and the output projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.layers.block import Part, Target, Whole
from gpu_worker.layers.weights import PLAIN, Reader


class Embedding(Whole):
    """A row [hidden_size] for each token of the vocabulary, held as plain numbers however it is stored."""

    def __init__(self, name: str, shape: tuple[int, int], target: Target) -> None:
        super().__init__(name, shape, target)
        module = name.removesuffix(".weight")
        self._reader = Reader(target.formats.get(module, PLAIN), module, shape)

    def parts(self) -> dict[str, Part]:
        return self._reader.parts

    def load(self, name: str, tensor: Tensor) -> None:
        stored = self._reader.add(name, tensor, self.weight.device)
        if stored is not None:
            self.weight.copy_(stored.values())

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
