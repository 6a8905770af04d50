"""Scores of forced tokens, gathered on the device step by step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.engine.steps.decode import StepResult

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
