"""Repetition, presence and frequency penalties of one request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.device import to_device
from gpu_worker.records import SamplingParams


class TokenCounts:
    """Which tokens a request has seen, and how often it has generated each.

    Kept on the device of the logits, and only for a request with a penalty: 5 bytes a vocabulary entry.
    """

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        self._prompt_token_ids: Sequence[int] = prompt_token_ids
        self._vocab_size = vocab_size
        self._pending: list[int] = []
        self._seen: torch.Tensor | None = None
        self._num_generated: torch.Tensor | None = None

    def append(self, token_id: int) -> None:
        """Count a generated token."""
        self._pending.append(token_id)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(seen [V] bool: in prompt or output; num_generated [V] float32: in the output)."""
        if self._seen is None or self._num_generated is None:
            self._seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=device)
            self._num_generated = torch.zeros(self._vocab_size, dtype=torch.float32, device=device)
            self._seen.index_fill_(0, to_device(np.array(self._prompt_token_ids, np.int64), device), True)
        if self._pending:
            token_ids = to_device(np.array(self._pending, np.int64), device)
            self._seen.index_fill_(0, token_ids, True)
            self._num_generated.index_add_(0, token_ids, torch.ones_like(token_ids, dtype=torch.float32))
            self._pending.clear()
        return self._seen, self._num_generated


def has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


def apply_penalties(logits: torch.Tensor, params: SamplingParams, counts: TokenCounts) -> None:
    """Change one row of logits, [V] float32, in place.

    Repetition (arXiv 1909.05858) divides a positive and multiplies a negative logit of every token of prompt
    and output; presence and frequency then subtract a constant and a multiple of the count, output only.
    """
    seen, num_generated = counts.on(logits.device)
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        # A tiny penalty must not make an infinity: the softmax of one is NaN.
        divided = (logits / penalty).clamp(max=torch.finfo(logits.dtype).max)
        penalised = torch.where(logits > 0, divided, logits * penalty)
        logits.copy_(torch.where(seen, penalised, logits))
    if params.presence_penalty != 0.0:
        logits.sub_((num_generated > 0).float(), alpha=params.presence_penalty)
    if params.frequency_penalty != 0.0:
        logits.sub_(num_generated, alpha=params.frequency_penalty)
