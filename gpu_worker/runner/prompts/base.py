"""Prompts that are computed together, however that is done: what each takes, and what the engine sees of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.errors import ArenaFull, StoreSilent, WorkerError, no_room, run_each
from gpu_worker.records import Event
from gpu_worker.records.plans import WorkKind
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.link import TrainedLayer
from gpu_worker.store.offload import Offloader


class Prompt(ABC):
    """On its way through the layers to its cache and the arena. `cancel` one that is not done.

    share: of the tokens that are computed together. trained: indexes that were asked for, until they are taken.
    """

    def __init__(self, sequence: Sequence, offloader: Offloader, share: float) -> None:
        self.sequence = sequence
        self.share = share
        self.first, self.num_tokens = sequence.num_cached, sequence.num_prefill
        self.trained: deque[TrainedLayer] = deque()
        self._offloader = offloader

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that are computed."""
        return self.sequence.prefill_token_ids[self.first :]

    @property
    @abstractmethod
    def computed_tokens(self) -> int:
        """Tokens computed so far, cached ones excluded. A token in progress counts by its finished share."""

    @property
    def left_tokens(self) -> int:
        """Neither computed nor cached."""
        return self.num_tokens - self.first - self.computed_tokens

    @property
    @abstractmethod
    def is_copying(self) -> bool:
        """Return whether a finished layer is not known to be in the arena."""

    @abstractmethod
    def take_copied(self) -> None:
        """Seal what is in the arena by now. Raises StoreUnavailable, and StoreSilent where it may be called again once
        the store answers."""

    @abstractmethod
    def wait(self) -> None:
        """Let the host wait until the next finished layer is in the arena, if one is on its way."""

    @abstractmethod
    def cancel(self) -> None:
        """Wait until all copies are done: then the slabs may be given to others."""

    def _note_copied(self, copied: Mark) -> None:
        """Observe how long a finished copy to the arena took, where anything had to be copied."""
        if copied.begun is not None:
            self._offloader.meter.offload.observe(copied.seconds_since(copied.begun))

    def publish(self) -> None:
        """Once all is done: let others find a copy of the prompt."""
        self._offloader.seal_copy(self.sequence)
        self.sequence.num_tokens = self.num_tokens


One = TypeVar("One", bound=Prompt, covariant=True)


class PromptPass(ABC, Generic[One]):
    """A prompt on its way through the layers, or several short ones together. `advance` does a quantum. `cancel`
    prompts that are not done.

    prompts: those that neither failed nor were cancelled, until they are taken.
    """

    def __init__(self, parts: list[One]) -> None:
        self._parts = parts
        self.prompts = list(parts)
        # By request, until they are taken.
        self.events: list[tuple[str, Event]] = []
        # Among the passes in progress.
        self.number = -1
        self._failed: list[tuple[Sequence, WorkerError]] = []
        self._num_counted = 0
        # Those of which logits are not taken yet.
        self._untold = set[Prompt](parts)

    @property
    def is_done(self) -> bool:
        """Every layer is computed, and in the arena if it goes there."""
        return len(self.done) == len(self.prompts)

    @property
    def is_computed(self) -> bool:
        """Every layer is computed, and maybe in the arena."""
        return all(map(self._has_computed, self.prompts))

    @property
    def is_copying(self) -> bool:
        """Every layer is computed, and some are not in the arena yet."""
        return self.is_computed and not self.is_done

    @property
    def done(self) -> list[One]:
        """The prompts that are done; the others may have to wait for a store that is silent."""
        return [prompt for prompt in self.prompts if self._has_computed(prompt) and not prompt.is_copying]

    @property
    @abstractmethod
    def next_work(self) -> float:
        """Floating-point operations of the next quantum; 0 where copies only are waited for."""

    @property
    @abstractmethod
    def next_kind(self) -> WorkKind:
        """The kind of the next quantum's operations."""

    @abstractmethod
    def _has_computed(self, prompt: Prompt) -> bool:
        """Return whether every layer of the prompt is computed."""

    @abstractmethod
    def _run_quantum(self, wait: bool) -> None:
        """Run the quantum of `advance`; failures go to `_fail`."""

    @abstractmethod
    def _logits(self, computed: list[Prompt]) -> Tensor:
        """Return the logits of the tokens after these prompts: float32 [P, vocab]."""

    def advance(self, wait: bool = True) -> list[tuple[Sequence, WorkerError]]:
        """Run one quantum; the last ones only wait for copies.

        wait: for a copy, where nothing is left to compute.

        Returns the prompts that failed, the others continue:
        StoreUnavailable: rows cannot be offloaded.
        PrefixLost: a known prefix is gone and the prompt must be computed anew.
        CapacityError: device memory runs out.
        Other errors: as caches raise them.

        A prompt that fails with StoreSilent continues once the store answers; if it needs a known prefix, no prompt of
        the pass continues before.
        """
        self._failed = []
        try:
            self._run_quantum(wait)
        except torch.OutOfMemoryError as error:
            self._fail([(prompt, no_room("the prompt", error)) for prompt in self.prompts])
        return self._failed

    def cancel(self, sequence: Sequence) -> deque[TrainedLayer]:
        """Wait until all copies of its prompt are done: then its slabs may be given to others. What is computed of it
        from now on goes nowhere. Returns the indexes that it still needed."""
        [part] = [part for part in self._parts if part.sequence is sequence]
        part.cancel()
        self.prompts = [prompt for prompt in self.prompts if prompt is not part]
        return part.trained

    def count_computed(self) -> int:
        """Prompt tokens that were computed since this was asked last."""
        before, self._num_counted = self._num_counted, sum(part.computed_tokens for part in self._parts)
        return self._num_counted - before

    def take_logits(self) -> tuple[list[One], Tensor] | None:
        """The prompts of which every layer was computed since this was asked last, and the logits of the tokens after
        them, float32 [P, vocab]; None for none."""
        computed = [
            prompt for prompt in self.prompts if prompt in self._untold and self._has_computed(prompt)
        ]
        if not computed:
            return None
        self._untold.difference_update(computed)
        return computed, self._logits([*computed])

    def leave(self, prompt: Prompt) -> None:
        """One that is done."""
        self.prompts = [other for other in self.prompts if other is not prompt]

    def _wait(self) -> None:
        for prompt in self.prompts:
            prompt.wait()

    def _settle(self) -> None:
        self._each(lambda prompt: prompt.take_copied())
        for prompt in self.done:
            prompt.publish()

    def _each(self, operation: Callable[[Any], None], prompts: Iterable[Prompt] | None = None) -> bool:
        """Do it for every prompt, or for these; where it fails that one leaves. False where one waits for a silent
        store."""
        failed: list[tuple[Prompt, WorkerError]] = []
        short: list[tuple[Prompt, ArenaFull]] = []
        run_each(self.prompts if prompts is None else prompts, operation, failed, short)
        return self._fail([*failed, *short])

    def _fail(self, failed: list[tuple[Prompt, WorkerError]]) -> bool:
        is_silent = False
        for prompt, error in failed:
            self._failed.append((prompt.sequence, error))
            match error:
                case StoreSilent():
                    is_silent = True
                case _:
                    self.cancel(prompt.sequence)
        return not is_silent
