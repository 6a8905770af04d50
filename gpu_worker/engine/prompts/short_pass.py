"""Short prompts through all layers at once, in memory that stays where it is, so that it may be captured."""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gpu_worker.device import Mark
from gpu_worker.engine.prompts.short_batch import BUCKETS, MAX_PROMPTS, ShortBatch
from gpu_worker.engine.steps.captured import Captured
from gpu_worker.kernels.prefill_attention import Packed, attend_prompts, reads_bounds
from gpu_worker.models import Decoder
from gpu_worker.row_format import empty_rows

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
        """The rows of the last run are read until this mark, beside the current stream."""
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
        """Whether attention needs no number from the host that is another for every batch."""
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
