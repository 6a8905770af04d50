"""One decode step: one new token for every sequence of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.engine.caches import CacheSet, GroupStep
from gpu_worker.engine.offload import Offloader, host_bytes
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
        kept = self._offload(sequences, rows, failed)
        if len(kept) < len(sequences):
            hidden = hidden[[sequences.index(sequence) for sequence in kept]]
        logits = self._decoder.logits(hidden) if kept else hidden
        return StepResult(kept, logits, failed)

    def _forward(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Last hidden states [B, hidden] and every layer's new rows [L, B, H_kv, 2d]."""
        decoder = self._decoder
        # One transfer for all three.
        seats, token_ids, positions = torch.tensor(
            [(sequence.seat, sequence.next_token, sequence.num_tokens) for sequence in sequences],
            device=self._device,
        ).unbind(1)
        hidden = decoder.embed(token_ids)
        new_rows = []
        by_layer = self._caches.begin_step(sequences, seats, positions)
        for layer, steps in enumerate(by_layer):
            query, key, value = decoder.project_qkv(layer, hidden, positions)
            rows = torch.cat([key, value], dim=-1).to(self._row_dtype)
            hidden = decoder.finish_layer(layer, hidden, _attend(layer, steps, query, rows))
            new_rows.append(rows)
        for step in dict.fromkeys(step for steps in by_layer for step in steps):
            step.finish()
        return hidden, torch.stack(new_rows)

    def _offload(
        self, sequences: list[Sequence], rows: Tensor, failed: list[tuple[Sequence, WorkerError]]
    ) -> list[Sequence]:
        """Write the new rows [L, B, H_kv, 2d] to the arena; the sequences that did not fail."""
        if not any(sequence.offloads for sequence in sequences):
            return sequences
        data = host_bytes(rows)
        places = {sequence: place for place, sequence in enumerate(sequences)}

        def put(sequence: Sequence) -> None:
            if sequence.offloads:
                self._offloader.put_token(sequence, sequence.num_tokens - 1, data[:, places[sequence]])

        return _each(sequences, put, failed)


def _attend(layer: int, steps: list[GroupStep], query: Tensor, rows: Tensor) -> Tensor:
    """Attention of the whole batch, [B, H_q, d], from the groups it falls into."""
    attention = torch.empty_like(query)
    for step in steps:
        group = step.group
        step.append(layer, group.part_of(rows))
        attended = step.attend(layer, group.part_of(query))
        if group.rows is None:
            return attended
        attention[group.rows] = attended
    return attention


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
