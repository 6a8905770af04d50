"""Prefill of prompts that are attended whole and are short enough for one pass over all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.caches import Cache
from gpu_worker.device import Mark
from gpu_worker.engine.pace import prompt_work
from gpu_worker.engine.prefill import Prefill
from gpu_worker.engine.prefills import AnyPass
from gpu_worker.engine.prompt import Prompt
from gpu_worker.engine.prompt_pass import PromptPass
from gpu_worker.engine.short_batch import MAX_PROMPTS, ShortBatch
from gpu_worker.engine.short_pass import ShortPass
from gpu_worker.errors import no_room
from gpu_worker.models import Decoder
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader


class ShortPrompt(Prompt):
    """All layers are computed at once, and go to cache and arena in one call each. No layer has an index."""

    def __init__(
        self, sequence: Sequence, cache: Cache, layers: range, offloader: Offloader, share: float
    ) -> None:
        """cache: of every layer."""
        super().__init__(sequence, offloader, share)
        self._cache = cache
        self._layers = layers
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
            self._copied = self._keeper.put_layers(self.sequence, self._layers, rows)
            self._cache.store_layers(self.sequence, self._layers, rows)
        except torch.OutOfMemoryError as error:
            raise no_room("the prompt", error) from error
        self._is_stored = True
        return self._copied

    def take_copied(self) -> None:
        if self._copied is None or not self._copied.is_reached:
            return
        if self.sequence.offloads:
            self._offloader.seal_layers(self.sequence, self._layers, self.num_tokens)
        self._copied = None

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.wait()

    def cancel(self) -> None:
        self.wait()
        self._copied = None


class ShortPrefill(PromptPass[ShortPrompt]):
    """One quantum computes all prompts that are there by then; a second may wait for copies."""

    is_short = True

    def __init__(
        self,
        sequences: list[Sequence],
        decoder: Decoder,
        caches: list[list[Cache]],
        offloader: Offloader,
        short_pass: ShortPass,
    ) -> None:
        """sequences: which `PrefillChoice` takes. caches: of each one's layers."""
        num_tokens = sum(sequence.num_prefill for sequence in sequences)
        layers = range(decoder.config.num_layers)
        super().__init__(
            [
                ShortPrompt(sequence, of_layers[0], layers, offloader, sequence.num_prefill / num_tokens)
                for sequence, of_layers in zip(sequences, caches, strict=True)
            ]
        )
        self._config = decoder.config
        self._pass = short_pass
        # Of each prompt that was computed, float32 [vocab].
        self._computed: dict[Prompt, Tensor] | None = None

    @property
    def next_work(self) -> float:
        if self._is_computed:
            return 0.0
        return sum(prompt_work(self._config, 0, prompt.num_tokens) for prompt in self.prompts)

    @property
    def _is_computed(self) -> bool:
        return self._computed is not None

    def _run_quantum(self) -> None:
        if self._is_computed:
            self._wait()
        else:
            self._compute()
        self._settle()

    def _compute(self) -> None:
        logits, rows = self._pass.run(ShortBatch.of([prompt.token_ids for prompt in self.prompts]))
        self._computed = dict(zip(self.prompts, logits, strict=False))
        of_prompts = dict(zip(self.prompts, rows, strict=True))

        def store(prompt: ShortPrompt) -> None:
            if (copied := prompt.store(of_prompts[prompt])) is not None:
                self._pass.is_read_until(copied)

        self._each(store)

    def _logits(self, done: list[Prompt]) -> Tensor:
        assert self._computed is not None, "what is done was computed"
        return torch.stack([self._computed[prompt] for prompt in done])


class PrefillChoice:
    """Makes an engine's prefills: of short prompts in one pass over all layers, of others layer by layer."""

    def __init__(self, short_pass: ShortPass) -> None:
        self._pass = short_pass

    def __call__(
        self,
        sequences: list[Sequence],
        decoder: Decoder,
        caches: list[list[Cache]],
        offloader: Offloader,
        chunk_size: int,
        max_tokens: int,
    ) -> AnyPass:
        """With the arguments of `Prefill`."""
        num_tokens = sum(sequence.num_prefill for sequence in sequences)
        fits = num_tokens <= self._pass.max_tokens and len(sequences) <= MAX_PROMPTS
        is_whole = not any(sequence.num_cached or sequence.prompt_attention() for sequence in sequences)
        is_dense = all(cache.is_dense for of_layers in caches for cache in of_layers)
        if self._pass.is_open and fits and is_whole and is_dense:
            return ShortPrefill(sequences, decoder, caches, offloader, self._pass)
        return Prefill(sequences, decoder, caches, offloader, chunk_size, max_tokens)
