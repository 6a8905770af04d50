"""Tokens that are being sampled: begun on the device, and taken later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device import to_device
from gpu_worker.errors import WorkerError, no_room
from gpu_worker.records import TokenEvent
from gpu_worker.runner.prompts.in_progress import AnyPass
from gpu_worker.sampling import Choice, Sampler
from gpu_worker.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each of some sequences."""

    sequences: list[Sequence]
    choice: Choice

    def take(self) -> Iterator[tuple[Sequence, TokenEvent | None]]:
        """Wait for them; None where logits were invalid. A sequence that ended, or was preempted, since then gets
        none."""
        for sequence, event in zip(self.sequences, self.choice.take(), strict=True):
            if sequence.is_prefilled:
                yield sequence, event


class Sampling:
    """Draws next tokens. num_forced: prompt tokens that went through decode steps (protocol P2)."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.num_forced = 0

    def draw(self, sequences: list[Sequence], logits: Tensor, num_coming: int = 0) -> Drawn | None:
        """Begin to draw the next token of each sequence, of logits [B, vocab]: the forced one if there is one, else
        one that is sampled now; None where all are forced.

        Forced tokens of a prompt count as computed, those that are only repeated do not. num_coming: see
        `Sampler.begin`.
        """
        places = [place for place, sequence in enumerate(sequences) if not sequence.forced]
        if len(places) < len(sequences):
            for sequence in sequences:
                if sequence.forced:
                    sequence.next_token = sequence.forced.popleft()
                    self.num_forced += not sequence.was_preempted
            index = to_device(np.array(places, np.int64), logits.device)
            sequences, logits = [sequences[place] for place in places], logits[index]
        if not sequences:
            return None
        states = [sequence.sampler for sequence in sequences]
        return Drawn(sequences, self._sampler.begin(logits, states, num_coming))


class FirstTokens:
    """The tokens after prompts: sampled as soon as these are computed, so that they wait for nothing that is queued
    later, and taken once their rows are where they go."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        # Of each sequence, and its place there; none where its token was forced.
        self._choices: dict[Sequence, tuple[Choice, int]] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def draw_after(self, prefill: AnyPass) -> list[tuple[Sequence, WorkerError]]:
        """Begin those of the prompts that are computed by now; returns the prompts that end because memory ran out."""
        try:
            if (computed := prefill.take_logits()) is not None:
                prompts, logits = computed
                self.draw([prompt.sequence for prompt in prompts], logits)
        except torch.OutOfMemoryError as error:
            return [
                (prompt.sequence, no_room("the token after a prompt", error)) for prompt in prefill.prompts
            ]
        return []

    def draw(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Draw the first tokens of sequences with computed prompts, from logits [P, vocab]; see `Sampling.draw`."""
        if (drawn := self._sampling.draw(sequences, logits)) is not None:
            places = range(len(drawn.sequences))
            self._choices.update(
                zip(drawn.sequences, ((drawn.choice, place) for place in places), strict=True)
            )

    def is_there(self, sequence: Sequence, wait: bool) -> bool:
        """Return whether the sequence's token is on the host. wait: until it is."""
        if (found := self._choices.get(sequence)) is None:
            return True
        if wait:
            found[0].wait()
        return found[0].is_reached

    def take(self, sequence: Sequence) -> list[tuple[Sequence, TokenEvent | None]]:
        """Its token, None where logits were invalid; nothing where it was forced."""
        if (found := self._choices.pop(sequence, None)) is None:
            return []
        choice, place = found
        return [(sequence, choice.take()[place])]

    def forget(self, sequence: Sequence) -> None:
        """Drop the token of a sequence that ended, or was preempted; no error without one."""
        self._choices.pop(sequence, None)
