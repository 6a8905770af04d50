"""Prefill of short prompts that are attended whole: one pass through all layers, captured on a GPU."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.caches import Cache, ServedLayer
from gpu_worker.device import Mark
from gpu_worker.engine.prompt_work import prompt_work
from gpu_worker.errors import no_room
from gpu_worker.kernels.prefill_attention import Packed, attend_prompts, reads_bounds
from gpu_worker.models import Decoder
from gpu_worker.records.plans import WorkKind
from gpu_worker.row_format import empty_rows
from gpu_worker.runner.prompts.base import Prompt, PromptPass
from gpu_worker.runner.steps.graphs import GRAPH_LAYER_BYTES, Captured
from gpu_worker.runner.workload import Workload
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader

# Of tokens. With more, a GPU computes for about as long as the host needs to tell it layer by layer.
BUCKETS = (*range(64, 641, 64), 768, 896, 1024)
MAX_PROMPTS = 8


def buckets_within(num_tokens: int) -> tuple[int, ...]:
    """Return the buckets that prompts of at most so many tokens need."""
    return BUCKETS[: bisect_left(BUCKETS, num_tokens) + 1]


@dataclass(frozen=True, slots=True)
class ShortBatch:
    """counts: tokens of each prompt. num_tokens: with padding, one of `BUCKETS`. table: int64 [2 num_tokens +
    MAX_PROMPTS + 1], the tokens' ids, their positions, and where each prompt begins and the last one ends; prompts that
    are not there are empty ones at the end. Padding has id and position 0."""

    counts: tuple[int, ...]
    num_tokens: int
    table: npt.NDArray[np.int64]

    @classmethod
    def of(cls, prompts: Ordered[Ordered[int]]) -> ShortBatch:
        """prompts: token ids; at most MAX_PROMPTS, of at most the largest bucket's tokens together."""
        counts = tuple(len(prompt) for prompt in prompts)
        total = sum(counts)
        size = BUCKETS[bisect_left(BUCKETS, total)]
        table = np.zeros(2 * size + MAX_PROMPTS + 1, np.int64)
        table[:total] = np.concatenate(prompts)
        table[size : size + total] = np.concatenate([np.arange(count) for count in counts])
        table[2 * size :] = total
        table[2 * size : 2 * size + len(counts)] = [0, *accumulate(counts[:-1])]
        return cls(counts, size, table)


logger = logging.getLogger(__name__)


class ShortPass:
    """Computes one batch at a time; its rows are there until the next one.

    On a GPU a pass of a new size runs as it is, the second is captured, later ones are replayed. Passes of all sizes
    share one pool of memory. If one cannot be captured, that is logged, and `is_open` ends.
    """

    def __init__(self, decoder: Decoder, max_tokens: int, captures: bool = True) -> None:
        """max_tokens: of a batch, at most `BUCKETS`' largest. captures: else every pass runs as it is."""
        config = decoder.config
        self._decoder = decoder
        self.max_tokens = min(max_tokens, BUCKETS[-1])
        self._captures = captures
        self._shape = (config.num_layers, config.num_kv_heads)
        # Made when the first batch comes: [num_layers * num_kv_heads * tokens, row_elements].
        self._rows: Tensor | None = None
        self._captured: dict[int, Captured] = {}
        self._seen: set[int] = set()
        self._memory_pool: Any = None
        # Until then copies may read the rows.
        self._read: list[Mark] = []
        self.is_open = not captures or self._is_capturable()

    def run(self, batch: ShortBatch) -> tuple[Tensor, list[Tensor]]:
        """Logits of the tokens after the prompts, float32 [MAX_PROMPTS, vocab], a copy; and each prompt's rows
        [L, H_kv, n, 2d], which the next run overwrites. Raises torch.OutOfMemoryError."""
        for mark in self._read:
            mark.hold()
        self._read.clear()
        logits = self._run(batch).clone()
        ends = accumulate(batch.counts)
        rows = self._rows_of(batch.num_tokens)
        return logits, [rows[:, :, end - count : end] for count, end in zip(batch.counts, ends, strict=True)]

    def is_read_until(self, mark: Mark) -> None:
        """Note that the rows of the last run are read until this mark, on a side stream."""
        self._read.append(mark)

    def forward(self, batch: ShortBatch, table: Tensor) -> Tensor:
        """The pass itself. table: the batch's on the device. Returns logits float32 [MAX_PROMPTS, vocab], of prompts
        that are not there the last one's."""
        decoder, size = self._decoder, batch.num_tokens
        token_ids, positions, bounds = table.split([size, size, MAX_PROMPTS + 1])
        bounds, last = bounds.int(), bounds[1:] - 1
        rows, head_dim = self._rows_of(size), decoder.config.head_dim
        hidden = decoder.embed(token_ids)
        packed: Packed | None = None
        for layer, of_layer in enumerate(rows):
            query, key, value = decoder.project_qkv(layer, hidden, positions)
            of_layer[..., :head_dim] = key.transpose(0, 1)
            of_layer[..., head_dim:] = value.transpose(0, 1)
            packed = packed or _packed(batch, bounds, query, of_layer)
            attention = attend_prompts(query, of_layer, packed, decoder.attention_scale)
            if layer == len(rows) - 1:
                # Nothing reads the last layer's output but the next tokens.
                hidden, attention = hidden[last], attention[last]
            hidden = decoder.finish_layer(layer, hidden, attention)
        return decoder.logits(hidden)

    def _run(self, batch: ShortBatch) -> Tensor:
        size, device = batch.num_tokens, self._decoder.device
        captured = self._captured.get(size)
        if captured is None and self._captures and self.is_open and size in self._seen:
            captured = self._capture(batch)
        if captured is not None:
            return captured.replay(batch.table)
        # The first time also compiles kernels, which must not happen under capture.
        self._seen.add(size)
        return self.forward(batch, torch.tensor(batch.table, device=device))

    def _capture(self, batch: ShortBatch) -> Captured | None:
        try:
            if self._memory_pool is None:
                self._memory_pool = torch.cuda.graph_pool_handle()
            captured = Captured.of(
                batch.table, self._decoder.device, lambda table: self.forward(batch, table), self._memory_pool
            )
        except RuntimeError as error:
            logger.warning("short prompts are computed layer by layer, which is slower: %s", error)
            self.is_open = False
            return None
        self._captured[batch.num_tokens] = captured
        return captured

    def _rows_of(self, size: int) -> Tensor:
        """[L, H_kv, size, 2d]"""
        num_heads = self._shape[0] * self._shape[1]
        if self._rows is None:
            most = next(bucket for bucket in BUCKETS if bucket >= self.max_tokens)
            row_format, device = self._decoder.row_format, self._decoder.device
            self._rows = empty_rows(row_format, most * num_heads, device=device)
        return self._rows[: size * num_heads].view(*self._shape, size, -1)

    def _is_capturable(self) -> bool:
        """Return whether attention needs no number from the host that differs between batches."""
        config = self._decoder.config
        heads = torch.empty(
            BUCKETS[0],
            config.num_heads,
            config.head_dim,
            dtype=self._decoder.dtype,
            device=self._decoder.device,
        )
        size, device = (config.num_kv_heads, BUCKETS[0]), self._decoder.device
        rows = empty_rows(self._decoder.row_format, *size, device=device)
        return reads_bounds(heads, rows)


def _packed(batch: ShortBatch, bounds: Tensor, query: Tensor, rows: Tensor) -> Packed:
    """On the host padding is a prompt by itself. Where only `bounds` count it is none, and nothing is said of the
    others but how long one may be: a captured pass has other batches."""
    size = batch.num_tokens
    if reads_bounds(query, rows):
        counts: tuple[int, ...] = (size,)
    else:
        padding = size - sum(batch.counts)
        counts = (*batch.counts, padding) if padding else batch.counts
    return Packed(counts, counts, bounds, bounds)


# Of a pass's logits: float32 and as they were, and a copy of them.
LOGIT_BYTES = 10
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
            self._copied = self._offloader.store_layers(self.sequence, in_arena, kept)
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


def short_pass_bytes(workload: Workload) -> int:
    """Rows of all layers of the largest pass, temporaries, and the graphs; 0 where nothing is captured. Sizes captured
    the smallest first take twice the largest one's temporaries, which are less than half of `token_bytes`."""
    shape = workload.shape
    if workload.dtype == torch.float32 or shape.head_dim > 256:
        return 0
    buckets = buckets_within(min(workload.prefill_chunk, shape.max_model_len))
    most = buckets[-1] if buckets else BUCKETS[0]
    rows = most * shape.num_layers * workload.head_layer_bytes
    logits = MAX_PROMPTS * workload.model.vocab_size * LOGIT_BYTES
    computing = most * workload.token_bytes + workload.product_bytes
    return rows + computing + logits + len(buckets) * shape.num_layers * GRAPH_LAYER_BYTES
