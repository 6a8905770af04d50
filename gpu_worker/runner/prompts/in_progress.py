"""The prompts in progress, and what computes each."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch

from gpu_worker.caches import CacheSet, ServedLayer
from gpu_worker.engine.prompt_room import buffer_sizes
from gpu_worker.errors import no_room
from gpu_worker.kernels.prefill_attention import plan_chunks
from gpu_worker.models import Decoder
from gpu_worker.row_format import empty_rows
from gpu_worker.runner.prompts.base import Prompt, PromptPass
from gpu_worker.runner.prompts.captured import ShortPass, ShortPrefill
from gpu_worker.runner.prompts.layered import Prefill
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.link import TrainedLayer
from gpu_worker.store.offload import Offloader

AnyPass = PromptPass[Prompt]
MakePrefill = Callable[[list[Sequence], Decoder, list[list[ServedLayer]], Offloader, int, int], AnyPass]


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


class Prefills(Mapping[Sequence, AnyPass]):
    """The passes in progress by sequence; sequences that are computed together have the same one."""

    def __init__(
        self,
        make: MakePrefill,
        decoder: Decoder,
        caches: CacheSet,
        offloader: Offloader,
        chunk_size: int,
        max_tokens: int,
    ) -> None:
        """chunk_size, max_tokens: see `Prefill`."""
        self._make = make
        self._decoder = decoder
        self._caches = caches
        self._offloader = offloader
        self._chunk_size = chunk_size
        self._max_tokens = max_tokens
        self._by_sequence: dict[Sequence, AnyPass] = {}
        self._numbers = itertools.count()

    def __getitem__(self, sequence: Sequence) -> AnyPass:
        return self._by_sequence[sequence]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_sequence)

    def __len__(self) -> int:
        return len(self._by_sequence)

    @property
    def left_tokens(self) -> int:
        """Neither computed nor cached."""
        return sum(prompt.left_tokens for prefill in self._distinct for prompt in prefill.prompts)

    def numbered(self, number: int) -> AnyPass:
        """Return the pass of this number, which has prompts in progress."""
        return next(prefill for prefill in self._distinct if prefill.number == number)

    @property
    def done(self) -> list[Prompt]:
        """The prompts that wait for their token alone."""
        return [prompt for prefill in self._distinct for prompt in prefill.done]

    @property
    def _distinct(self) -> list[AnyPass]:
        return list(dict.fromkeys(self._by_sequence.values()))

    def plan_attention(self) -> Iterator[None]:
        """Have all planned that attention of any prompt needs, one thing a turn, so that the caller may stop. Takes the
        memory of the longest prompt's rows. Raises CapacityError."""
        config, dtype, device = self._decoder.config, self._decoder.dtype, self._decoder.device
        try:
            query = torch.zeros(
                self._chunk_size, config.num_heads, config.head_dim, dtype=dtype, device=device
            )
            for num_rows in buffer_sizes(self._max_tokens):
                rows = empty_rows(
                    self._decoder.row_format, config.num_kv_heads, num_rows, device=device
                ).zero_()
                yield from plan_chunks(query, rows, self._decoder.attention_scale)
        except torch.OutOfMemoryError as error:
            raise no_room("plans of attention", error) from error

    def begin(self, sequences: list[Sequence]) -> AnyPass:
        """Begin the prompts of sequences that were admitted together. Raises CapacityError."""
        layers = [self._caches.of(sequence) for sequence in sequences]
        sizes = self._chunk_size, self._max_tokens
        try:
            prefill = self._make(sequences, self._decoder, layers, self._offloader, *sizes)
        except torch.OutOfMemoryError as error:
            raise no_room("the prompt", error) from error
        prefill.number = next(self._numbers)
        self._by_sequence.update(dict.fromkeys(sequences, prefill))
        return prefill

    def cancel(self, sequence: Sequence) -> deque[TrainedLayer]:
        """Forget a prompt that is not done; returns the indexes that it still needed, of an unknown one none."""
        prefill = self._by_sequence.pop(sequence, None)
        return deque() if prefill is None else prefill.cancel(sequence)

    def finish(self, prompt: Prompt) -> AnyPass:
        """Take out a prompt that is done; returns its pass."""
        prefill = self._by_sequence.pop(prompt.sequence)
        prefill.leave(prompt)
        return prefill
