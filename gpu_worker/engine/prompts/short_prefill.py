"""Prefill of prompts that are attended whole and are short enough for one pass over all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.caches import Cache, ServedLayer
from gpu_worker.device import Mark
from gpu_worker.engine.prompts.prefill import Prefill
from gpu_worker.engine.prompts.prefills import AnyPass
from gpu_worker.engine.prompts.prompt import Prompt
from gpu_worker.engine.prompts.prompt_pass import PromptPass
from gpu_worker.engine.prompts.short_batch import MAX_PROMPTS, ShortBatch
from gpu_worker.engine.prompts.short_pass import ShortPass
from gpu_worker.engine.prompts.work import WorkKind, prompt_work
from gpu_worker.errors import no_room
from gpu_worker.models import Decoder
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader

# Of a pass for several prompts. With more tokens it takes about as long as two of half as many.
GROUP_TOKENS = 512


class ShortPrompt(Prompt):
    """All layers are computed at once, and go to each cache and to the arena in one call. No layer has an index."""

    def __init__(
        self, sequence: Sequence, layers: list[ServedLayer], offloader: Offloader, share: float
    ) -> None:
        super().__init__(sequence, offloader, share)
        self._by_cache: dict[Cache, list[int]] = {}
        for layer, served in enumerate(layers):
            self._by_cache.setdefault(served.cache, []).append(layer)
        self._kept = [layer for layer, served in enumerate(layers) if served.kept is not None]
        self._is_stored = False
        self._copied: Mark | None = None

    @property
    def computed_tokens(self) -> int:
        return self.num_tokens if self._is_stored else 0

    @property
    def is_copying(self) -> bool:
        return self._copied is not None

    def store(self, rows: Tensor) -> Mark | None:
        """rows: [L, H_kv, n, 2d], not to be changed on another stream than the current one until the mark, if there is
        one. Raises CapacityError and StoreUnavailable; then the prompt is to be cancelled."""
        try:
            in_arena, kept = range(len(self._kept)), _of_layers(rows, self._kept)
            self._copied = self._keeper.put_layers(self.sequence, in_arena, kept)
            for cache, layers in self._by_cache.items():
                cache.store_layers(self.sequence, _of_layers(rows, layers))
        except torch.OutOfMemoryError as error:
            raise no_room("the prompt", error) from error
        self._is_stored = True
        return self._copied

    def take_copied(self) -> None:
        if self._copied is None or not self._copied.is_reached:
            return
        if self.sequence.offloads:
            self._offloader.seal_layers(self.sequence, range(len(self._kept)), self.num_tokens)
        self._note_copied(self._copied)
        self._copied = None

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.wait()

    def cancel(self) -> None:
        self.wait()
        self._copied = None


class ShortPrefill(PromptPass[ShortPrompt]):
    """A quantum computes as many prompts as one pass is for."""

    def __init__(
        self,
        sequences: list[Sequence],
        decoder: Decoder,
        layers: list[list[ServedLayer]],
        offloader: Offloader,
        short_pass: ShortPass,
    ) -> None:
        """sequences: which `PrefillChoice` takes. layers: of each sequence."""
        num_tokens = sum(sequence.num_prefill for sequence in sequences)
        super().__init__(
            [
                ShortPrompt(sequence, of_sequence, offloader, sequence.num_prefill / num_tokens)
                for sequence, of_sequence in zip(sequences, layers, strict=True)
            ]
        )
        self._config = decoder.config
        self._pass = short_pass
        # Of each prompt that was computed, float32 [vocab].
        self._computed: dict[Prompt, Tensor] = {}

    @property
    def next_work(self) -> float:
        return sum((prompt_work(self._config, 0, prompt.num_tokens) for prompt in self._next_group()), 0.0)

    @property
    def next_kind(self) -> WorkKind:
        return WorkKind.SHORT

    def _has_computed(self, prompt: Prompt) -> bool:
        return prompt in self._computed

    def _run_quantum(self, wait: bool) -> None:
        if group := self._next_group():
            self._compute(group)
        elif wait:
            self._wait()
        self._settle()

    def _next_group(self) -> list[ShortPrompt]:
        """The first prompts that are not computed yet."""
        group: list[ShortPrompt] = []
        most = min(GROUP_TOKENS, self._pass.max_tokens)
        for prompt in self.prompts:
            if not self._has_computed(prompt):
                total = prompt.num_tokens + sum(other.num_tokens for other in group)
                if group and (total > most or len(group) == MAX_PROMPTS):
                    break
                group.append(prompt)
        return group

    def _compute(self, group: list[ShortPrompt]) -> None:
        logits, rows = self._pass.run(ShortBatch.of([prompt.token_ids for prompt in group]))
        self._computed.update(zip(group, logits, strict=False))
        of_prompts = dict(zip(group, rows, strict=True))

        def store(prompt: ShortPrompt) -> None:
            if (copied := prompt.store(of_prompts[prompt])) is not None:
                self._pass.is_read_until(copied)

        self._each(store, group)

    def _logits(self, computed: list[Prompt]) -> Tensor:
        return torch.stack([self._computed[prompt] for prompt in computed])


def _of_layers(rows: Tensor, layers: list[int]) -> Tensor:
    """Rows [L, H_kv, n, 2d] of some layers, ascending; a view where they are neighbours."""
    if layers and layers[-1] - layers[0] == len(layers) - 1:
        return rows[layers[0] : layers[-1] + 1]
    return torch.stack([rows[layer] for layer in layers]) if layers else rows[:0]


class PrefillChoice:
    """Makes an engine's prefills: of short prompts in one pass over all layers, of others layer by layer."""

    def __init__(self, short_pass: ShortPass) -> None:
        self._pass = short_pass

    def __call__(
        self,
        sequences: list[Sequence],
        decoder: Decoder,
        layers: list[list[ServedLayer]],
        offloader: Offloader,
        chunk_size: int,
        max_tokens: int,
    ) -> AnyPass:
        """With the arguments of `Prefill`."""
        fits = all(sequence.num_prefill <= self._pass.max_tokens for sequence in sequences)
        is_whole = not any(sequence.num_cached or sequence.prompt_attention() for sequence in sequences)
        is_whole = is_whole and not any(sequence.scores_prompt for sequence in sequences)
        is_dense = all(served.cache.is_dense for of_sequence in layers for served in of_sequence)
        if self._pass.is_open and fits and is_whole and is_dense:
            return ShortPrefill(sequences, decoder, layers, offloader, self._pass)
        return Prefill(sequences, decoder, layers, offloader, chunk_size, max_tokens)
