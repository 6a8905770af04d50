"""Scores of forced tokens and output errors of measured requests, gathered on the device step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_worker.runner.steps.decode import StepResult
from gpu_worker.state.sequence import Sequence

# What is kept of a forced token.
NLL, KL, SAME = range(3)


@dataclass(frozen=True, slots=True)
class Lane:
    """A request whose tokens behind the first `num_context` are forced. place: in the scores. document: whose logits
    under dense attention it is compared with. is_reference: it gives them."""

    token_ids: tuple[int, ...]
    num_context: int
    place: int
    document: int
    is_reference: bool

    def slot(self, num_tokens: int) -> int | None:
        """Which of its predictions a step made after which so many tokens are past; None where none is scored.

        The first forced token is predicted by the prefill, which every policy shares: it is not scored.
        """
        place = num_tokens - self.num_context - 1
        return place if place >= 0 and num_tokens < len(self.token_ids) else None


class Scores:
    """Scores of `num_lanes` requests with `num_slots` predictions each: float64 [lanes, slots, 3] on `device`.

    They are the negative log likelihood of the forced token, in nats, the Kullback-Leibler divergence of the prediction
    from that of dense attention, in nats, and whether both have the same best token. References are float32
    [documents, slots, vocab].
    """

    def __init__(
        self, num_lanes: int, num_documents: int, num_slots: int, vocab_size: int, device: torch.device
    ) -> None:
        self._values = torch.full((num_lanes, num_slots, 3), torch.nan, dtype=torch.float64, device=device)
        self._references = torch.full((num_documents, num_slots, vocab_size), torch.nan, device=device)
        self._lanes: dict[str, Lane] = {}

    def add(self, request_id: str, lane: Lane) -> None:
        self._lanes[request_id] = lane

    def note(self, result: StepResult) -> None:
        """Take what a decode step predicted."""
        rows: list[int] = []
        where: list[tuple[int, int, int, int]] = []
        for row, sequence in enumerate(result.sequences):
            lane = self._lanes.get(sequence.sequence_id)
            slot = lane.slot(sequence.num_tokens) if lane is not None else None
            if lane is not None and slot is not None:
                rows.append(row)
                where.append((lane.place, slot, lane.document, lane.token_ids[sequence.num_tokens]))
                if lane.is_reference:
                    self._references[lane.document, slot] = result.logits[row].float().log_softmax(-1)
        if rows:
            self._score(result.logits[rows], torch.tensor(where, device=result.logits.device))

    def _score(self, logits: Tensor, where: Tensor) -> None:
        """logits [B, vocab]; where: int64 [B, 4], of each its place, slot, document and token."""
        place, slot, document, target = where.unbind(1)
        log_probs = logits.float().log_softmax(-1)
        reference = self._references[document, slot]
        nll = -log_probs.gather(1, target[:, None])[:, 0]
        divergence = (reference.exp() * (reference - log_probs)).sum(-1)
        same = log_probs.argmax(-1) == reference.argmax(-1)
        self._values[place, slot] = torch.stack([nll, divergence, same], dim=1).double()

    def means(self, place: int) -> tuple[float, float, float] | None:
        """Return a lane's means; None where one of its predictions is missing or not finite."""
        nll, divergence, same = self._values[place].mean(0).tolist()
        return (nll, divergence, same) if nll == nll and divergence == divergence else None


@dataclass(slots=True)
class _Sum:
    """A request's errors in one layer, summed over steps: float64 [H_q]."""

    errors: Tensor
    num_steps: int = 0


@dataclass(slots=True)
class OutputErrors:
    """By request and layer: how far each query head's output was from exact attention, as `Probe.watch` tells it."""

    _sums: dict[str, dict[int, _Sum]] = field(default_factory=dict)

    def note(self, sequence: Sequence, layers: range, errors: Tensor) -> None:
        """errors: float32 [L, H_q]."""
        of_request = self._sums.setdefault(sequence.sequence_id, {})
        for layer, row in zip(layers, errors.double(), strict=True):
            of_layer = of_request.setdefault(layer, _Sum(torch.zeros_like(row)))
            of_layer.errors += row
            of_layer.num_steps += 1

    def take(self, request_id: str) -> tuple[tuple[float, ...], ...] | None:
        """Means over the steps of a request, by layer and query head, of layers that are not dense; None for one that
        was not measured. Asked once: they are forgotten then."""
        sums = self._sums.pop(request_id, None)
        if sums is None:
            return None
        means = torch.stack([sums[layer].errors / sums[layer].num_steps for layer in sorted(sums)])
        return tuple(map(tuple, means.tolist()))
