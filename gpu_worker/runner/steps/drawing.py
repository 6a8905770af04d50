"""Tokens that are being sampled: begun on the device, and taken later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device import to_device
from gpu_worker.errors import WorkerError, no_room
from gpu_worker.records import EngineStats, TokenEvent
from gpu_worker.runner.prompts.in_progress import AnyPass
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


def draw(
    sampler: Sampler, sequences: list[Sequence], logits: Tensor, stats: EngineStats, num_coming: int = 0
) -> Drawn | None:
    """The next token of each, of logits [B, vocab]: the forced one if there is one, else one that is sampled now.

    Forced ones of a prompt count as computed in `stats`, those that are only repeated do not. num_coming: see
    `Sampler.begin`.
    """
    places = [place for place, sequence in enumerate(sequences) if not sequence.forced]
    if len(places) < len(sequences):
        for sequence in sequences:
            if sequence.forced:
                sequence.next_token = sequence.forced.popleft()
                stats.prompt_tokens_total += not sequence.has_given_way
        index = to_device(np.array(places, np.int64), logits.device)
        sequences, logits = [sequences[place] for place in places], logits[index]
    if not sequences:
        return None
    states = [sequence.sampler for sequence in sequences]
    return Drawn(sequences, sampler.begin(logits, states, num_coming))


class FirstTokens:
    """The tokens after prompts: sampled as soon as these are computed, so that they wait for nothing that is queued
    later, and taken once their rows are where they go."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        # Of each sequence, and its place there; none where its token was forced.
        self._choices: dict[Sequence, tuple[Choice, int]] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def draw_after(self, prefill: AnyPass, stats: EngineStats) -> list[tuple[Sequence, WorkerError]]:
        """Begin those of the prompts that are computed by now; returns the prompts that end because memory ran out."""
        try:
            if (computed := prefill.take_logits()) is not None:
                prompts, logits = computed
                self.draw((prompt.sequence for prompt in prompts), logits, stats)
        except torch.OutOfMemoryError as error:
            return [
                (prompt.sequence, no_room("the token after a prompt", error)) for prompt in prefill.prompts
            ]
        return []

    def draw(self, sequences: Iterable[Sequence], logits: Tensor, stats: EngineStats) -> None:
        """Begin those of sequences whose prompts are computed, of logits [P, vocab]; see `draw`."""
        if (drawn := draw(self._sampler, [*sequences], logits, stats)) is not None:
            places = range(len(drawn.sequences))
            self._choices.update(
                zip(drawn.sequences, ((drawn.choice, place) for place in places), strict=True)
            )

    def is_there(self, sequence: Sequence, wait: bool) -> bool:
        """Whether its token is on the host; wait: until it is."""
        if (found := self._choices.get(sequence)) is None:
            return True
        if wait:
            found[0].wait()
        return found[0].is_reached

    def take(self, sequence: Sequence) -> list[TokenEvent | None]:
        """Its token, None where logits were invalid; nothing where it was forced."""
        if (found := self._choices.pop(sequence, None)) is None:
            return []
        choice, place = found
        return [choice.take()[place]]

    def forget(self, sequence: Sequence) -> None:
        """Of a sequence that ended, or gives way; no error without one."""
        self._choices.pop(sequence, None)
