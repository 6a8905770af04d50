"""Tokens that are being sampled: begun on the device, and taken later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from gpu_worker.records import EngineStats, TokenEvent
from gpu_worker.sampling import Choice, Sampler
from gpu_worker.state.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each of some sequences."""

    sequences: list[Sequence]
    choice: Choice

    def take(self) -> Iterator[tuple[Sequence, TokenEvent | None]]:
        """Wait for them. Whoever ended, or gave way, since then takes none; None where logits were invalid."""
        for sequence, event in zip(self.sequences, self.choice.take(), strict=True):
            if sequence.status in (Status.INDEXING, Status.DECODE):
                yield sequence, event


def draw(sampler: Sampler, sequences: list[Sequence], logits: Tensor, stats: EngineStats) -> Drawn | None:
    """The next token of each, of logits [B, vocab]: the forced one if there is one, else one that is sampled now.

    Forced ones of a prompt count as computed in `stats`, those that are only repeated do not.
    """
    places = [place for place, sequence in enumerate(sequences) if not sequence.forced]
    if len(places) < len(sequences):
        for sequence in sequences:
            if sequence.forced:
                sequence.next_token = sequence.forced.popleft()
                stats.prompt_tokens_total += not sequence.has_given_way
        sequences, logits = [sequences[place] for place in places], logits[places]
    if not sequences:
        return None
    return Drawn(sequences, sampler.begin(logits, [sequence.sampler for sequence in sequences]))
