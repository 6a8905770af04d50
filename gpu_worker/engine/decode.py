"""One decode step: one new token for every sequence of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.engine.caches import CacheSet
from gpu_worker.engine.offload import Offloader
from gpu_worker.engine.sequence import Sequence
from gpu_worker.errors import WorkerError
from gpu_worker.models import Decoder


@dataclass(frozen=True, slots=True)
class StepResult:
    """Logits, float32 [B, vocab], of the sequences that finished the step, and the errors of those that did not."""

    sequences: list[Sequence]
    logits: Tensor
    failed: list[tuple[Sequence, WorkerError]]


class DecodeStep:
    """Runs the model over the next tokens of any mix of lengths, policies and budgets."""

    def __init__(
        self,
        decoder: Decoder,
        caches: CacheSet,
        offloader: Offloader,
        row_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._offloader = offloader
        self._row_dtype = row_dtype
        self._device = device

    def run(self, sequences: list[Sequence]) -> StepResult:
        """Advance every sequence by its `next_token`. Raises StoreUnavailable if recalled rows cannot be had."""
        failed: list[tuple[Sequence, WorkerError]] = []
        sequences = _each(sequences, self._caches.advance, failed)
        if not sequences:
            return StepResult([], torch.empty(0), failed)
        hidden, rows = self._forward(sequences)
        for sequence in sequences:
            sequence.num_tokens += 1
        offloading = [sequence for sequence in sequences if sequence.offloads]
        places = {sequence: place for place, sequence in enumerate(sequences)}
        _each(
            offloading,
            lambda sequence: self._offloader.put_token(
                sequence, sequence.num_tokens - 1, rows[:, places[sequence]]
            ),
            failed,
        )
        lost = {sequence for sequence, _ in failed}
        kept = [sequence for sequence in sequences if sequence not in lost]
        logits = self._decoder.logits(hidden[[places[sequence] for sequence in kept]]) if kept else hidden[:0]
        return StepResult(kept, logits, failed)

    def _forward(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Last hidden states [B, hidden] and every layer's new rows [L, B, H_kv, 2d]."""
        decoder, device = self._decoder, self._device
        positions = torch.tensor([sequence.num_tokens for sequence in sequences], device=device)
        hidden = decoder.embed(torch.tensor([sequence.next_token for sequence in sequences], device=device))
        new_rows = []
        for layer, groups in enumerate(self._caches.groups(sequences, positions)):
            query, key, value = decoder.project_qkv(layer, hidden, positions)
            rows = torch.cat([key, value], dim=-1).to(self._row_dtype)
            attention = torch.empty_like(query)
            for cache, group in groups:
                cache.append(layer, group, rows[group.rows])
                attention[group.rows] = cache.attend(layer, group, query[group.rows])
            hidden = decoder.finish_layer(layer, hidden, attention)
            new_rows.append(rows)
        return hidden, torch.stack(new_rows)


def _each(
    sequences: list[Sequence],
    operation: Callable[[Sequence], None],
    failed: list[tuple[Sequence, WorkerError]],
) -> list[Sequence]:
    """The sequences whose operation succeeded; the others go to `failed` with their error."""
    kept = []
    for sequence in sequences:
        try:
            operation(sequence)
            kept.append(sequence)
        except WorkerError as error:
            failed.append((sequence, error))
    return kept
