"""Layer-major prefill: all chunks of one layer, then the next layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from gpu_worker.caches import Cache
from gpu_worker.device import Mark
from gpu_worker.engine.pace import last_layer_work, layer_work
from gpu_worker.engine.prompt_memory import buffer_tokens
from gpu_worker.errors import no_room
from gpu_worker.kernels.prefill_attention import attend_chunk
from gpu_worker.models import Decoder
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.layer_writer import PendingLayer
from gpu_worker.store.offload import Offloader, TrainedLayer


@dataclass(frozen=True, slots=True)
class _Computed:
    """A computed layer on its way to the arena, and the time that computing it took: between two marks, decode steps
    between its chunks included."""

    pending: PendingLayer
    begun: Mark
    ended: Mark


class Prefill:
    """One prompt on its way through the layers. A quantum is one (layer, chunk), or several that have a chunk's tokens
    together, so that a short prompt takes few. `advance` does one.

    Between quanta the hidden states of the whole prompt, [n, hidden], and one layer's rows, [H_kv, n, 2d], are kept;
    two layers' in turn where one is copied to the arena while the next is computed. Heads of rows lie a power of two of
    rows apart (`buffer_tokens`): cuDNN plans attention again, for tens of milliseconds, at every other distance. Of a
    prefix that the store has (`num_cached`) only rows are read. `cancel` a prefill that is not done.
    """

    def __init__(
        self,
        sequence: Sequence,
        decoder: Decoder,
        caches: list[Cache],
        offloader: Offloader,
        chunk_size: int,
        max_tokens: int,
    ) -> None:
        """chunk_size: tokens of a quantum. max_tokens: of the longest prompt. Raises torch.OutOfMemoryError."""
        config, device = decoder.config, decoder.device
        self.sequence = sequence
        self._decoder = decoder
        self._caches = caches
        self._offloader = offloader
        self._chunk_size = chunk_size
        self._device = device
        # The first token that is computed, and the number of all.
        self._first, self._num_tokens = sequence.num_cached, sequence.num_prefill
        token_ids = sequence.prefill_token_ids[self._first :]
        self._positions = torch.arange(self._first, self._num_tokens, device=device)
        self._hidden = decoder.embed(torch.tensor(token_ids, device=device))
        shape = (config.num_kv_heads, buffer_tokens(self._num_tokens, max_tokens), 2 * config.head_dim)
        # Who takes the layers to the arena, and has those of a known prefix.
        self._keeper = offloader if sequence.offloads else offloader.copies
        num_buffers = 2 if self._keeper.holds(sequence) and offloader.copies_aside else 1
        buffers = [torch.empty(shape, dtype=decoder.dtype, device=device) for _ in range(num_buffers)]
        self._buffers = [buffer[:, : self._num_tokens] for buffer in buffers]
        self._queries = self._query_buffer()
        self._sparse = sequence.prompt_attention()
        # When the rows in each buffer are in the arena.
        self._copied: list[Mark | None] = [None] * num_buffers
        # Known rows of the next layer on their way.
        self._loading: Mark | None = None
        self._layer = 0
        self._begin = self._first
        self._begun = Mark(device)
        self._computed: deque[_Computed] = deque()
        # Indexes that the store trains while later layers compute, until they are taken.
        self.trained: deque[TrainedLayer] = deque()

    def _query_buffer(self) -> Tensor:
        """One layer's queries of the last tokens, as many as the policy reads: [w, H_q, d]."""
        config, sequence, rows = self._decoder.config, self.sequence, self._buffers[0]
        asked = sequence.policy.num_queries(sequence.plan) if sequence.plan.selects else 0
        return rows.new_empty(min(asked, self._num_tokens), config.num_heads, config.head_dim)

    @property
    def is_done(self) -> bool:
        """Every layer is computed, and in the arena if it goes there."""
        return self._is_computed and not self._computed

    @property
    def next_work(self) -> float:
        """Floating-point operations of the next quantum; 0 where copies only are waited for."""
        config, begin, end = self._decoder.config, self._begin, self._next_end
        if self._is_computed:
            return 0.0
        num_layers = max(1, self._chunk_size // (end - begin))
        layers = range(self._layer, min(self._layer + num_layers, config.num_layers))
        last = last_layer_work(config, begin, end) if layers.stop == config.num_layers else 0.0
        num_whole = len(layers) - bool(last)
        return num_whole * layer_work(config, begin, end) + last

    @property
    def computed_tokens(self) -> int:
        """Of those that are not cached, each chunk of a layer as its share of the whole."""
        num_layers, num_tokens = self._decoder.config.num_layers, self._num_tokens - self._first
        return (self._layer * num_tokens + self._begin - self._first) // num_layers

    @property
    def left_tokens(self) -> int:
        """Neither computed nor cached."""
        return self._num_tokens - self._first - self.computed_tokens

    @property
    def _is_computed(self) -> bool:
        return self._layer == self._decoder.config.num_layers

    @property
    def _next_end(self) -> int:
        return min(self._begin + self._chunk_size, self._num_tokens)

    @property
    def _rows(self) -> Tensor:
        return self._buffers[self._layer % len(self._buffers)]

    def advance(self) -> None:
        """One quantum; the last may only wait for copies. Raises StoreUnavailable when rows cannot be offloaded,
        PrefixLost when a known prefix is gone and the prompt must be computed anew, StoreSilent where it may be called
        again once the store answers, and CapacityError when device memory runs out."""
        try:
            self._run_quantum()
        except torch.OutOfMemoryError as error:
            raise no_room("the prompt", error) from error

    def _run_quantum(self) -> None:
        if self._is_computed:
            self._computed[0].pending.copied.wait()
        left = self._chunk_size
        while not self._is_computed and (end := self._next_end) - self._begin <= left:
            left -= end - self._begin
            self._run_chunk(self._begin, end)
            self._begin = end
            if end == self._num_tokens:
                self._finish_layer()
        self._take_copied()
        if self.is_done:
            self._offloader.copies.end(self.sequence)
            self.sequence.num_tokens = self._num_tokens

    def cancel(self) -> None:
        """Wait until all copies are done: then the slabs may be given to others."""
        for computed in self._computed:
            computed.pending.copied.wait()
        self._computed.clear()
        if self._loading is not None:
            self._loading.wait()

    def logits(self) -> Tensor:
        """Of the token after the prompt: float32 [vocab]. Only when done."""
        return self._decoder.logits(self._hidden[-1:])[0]

    def _run_chunk(self, begin: int, end: int) -> None:
        decoder, layer, rows = self._decoder, self._layer, self._rows
        if begin == self._first > 0:
            self._take_known()
        computed = slice(begin - self._first, end - self._first)
        query, key, value = decoder.project_qkv(layer, self._hidden[computed], self._positions[computed])
        head_dim = decoder.config.head_dim
        rows[:, begin:end, :head_dim] = key.transpose(0, 1)
        rows[:, begin:end, head_dim:] = value.transpose(0, 1)
        first_kept = self._num_tokens - self._queries.shape[0]
        if end > first_kept:
            kept = max(begin, first_kept)
            self._queries[kept - first_kept : end - first_kept] = query[kept - begin :]
        if self._sparse is not None and not self._caches[layer].is_dense:
            attention = self._sparse.attend(query, rows, begin, decoder.attention_scale)
        else:
            if layer == decoder.config.num_layers - 1:
                # Nothing reads the last layer's output but the next token.
                if end < self._num_tokens:
                    return
                begin, query = end - 1, query[-1:]
            attention = attend_chunk(query, rows, begin, decoder.attention_scale)
        computed = slice(begin - self._first, end - self._first)
        self._hidden[computed] = decoder.finish_layer(layer, self._hidden[computed], attention)

    def _take_known(self) -> None:
        """The rows of a known prefix, of this layer; those of the next are on their way while this one is computed."""
        layer = self._layer
        loading = self._loading if self._loading is not None else self._load(layer)
        loading.hold()
        self._loading = None
        if len(self._buffers) > 1 and layer + 1 < self._decoder.config.num_layers:
            self._loading = self._load(layer + 1)

    def _load(self, layer: int) -> Mark:
        place = layer % len(self._buffers)
        return self._keeper.load_layer(self.sequence, layer, self._buffers[place], self._copied[place])

    def _finish_layer(self) -> None:
        sequence, layer, rows = self.sequence, self._layer, self._rows
        ended = Mark(self._device)
        if (pending := self._keeper.put_layer(sequence, layer, rows)) is not None:
            self._computed.append(_Computed(pending, self._begun, ended))
            self._copied[layer % len(self._buffers)] = pending.copied
        self._caches[layer].store(sequence, layer, rows, self._queries.transpose(0, 1))
        self._layer, self._begin, self._begun = layer + 1, self._first, ended
        if (copied := self._copied[self._layer % len(self._buffers)]) is not None:
            # The next layer's rows take the place of these.
            copied.hold()

    def _take_copied(self) -> None:
        """Seal the layers that are in the arena by now, and request their indexes."""
        copied = list(takewhile(lambda computed: computed.pending.copied.is_reached, self._computed))
        if copied and self.sequence.offloads:
            layers = range(copied[0].pending.layer, copied[-1].pending.layer + 1)
            # They stay until the store has answered.
            self._offloader.seal_layers(self.sequence, layers, self._num_tokens)
        for computed in copied:
            self._computed.popleft()
            if self.sequence.offloads:
                self._ask_for_index(computed.pending.layer, computed.ended.seconds_since(computed.begun))

    def _ask_for_index(self, layer: int, prefill_seconds: float) -> None:
        sequence, job = self.sequence, self._caches[layer].prompt_job(self.sequence, layer)
        if job is not None:
            self.trained.append(self._offloader.build(sequence, layer, job, prefill_seconds))


MakePrefill = Callable[[Sequence, Decoder, list[Cache], Offloader, int, int], Prefill]
