"""Layer-major prefill: all chunks of one layer, then the next layer."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from gpu_worker.caches import ServedLayer
from gpu_worker.device import Mark, to_device
from gpu_worker.engine.prompt_room import buffer_tokens
from gpu_worker.engine.prompt_work import last_layer_work, layer_work
from gpu_worker.kernels.prefill_attention import Packed, attend_chunk, attend_prompts
from gpu_worker.models import Decoder
from gpu_worker.records import PromptEvent
from gpu_worker.records.plans import WorkKind
from gpu_worker.row_format import empty_rows
from gpu_worker.runner.prompts.base import Prompt, PromptPass
from gpu_worker.runner.prompts.prompt_memory import scored_at_once
from gpu_worker.runner.prompts.prompt_rows import PromptRows
from gpu_worker.sampling.filters import first_k, ranks
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader


class Prefill(PromptPass[PromptRows]):
    """Layer by layer; several short prompts are packed one behind another, and share each pass over a layer's weights.
    A quantum is one (layer, chunk), or several that have a chunk's tokens together, so that short prompts take few.

    Between quanta the hidden states of all tokens, [T, hidden], and one layer's rows, [H_kv, n, 2d], are kept; two
    layers' in turn where one is copied to the arena while the next is computed. Heads of a prompt's rows lie a power
    of two of rows apart (`buffer_tokens`): cuDNN plans attention again, for tens of milliseconds, at every other
    distance. Of prefixes that the store has (`num_cached`) only rows are read.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        decoder: Decoder,
        layers: list[list[ServedLayer]],
        offloader: Offloader,
        chunk_size: int,
        max_tokens: int,
    ) -> None:
        """sequences: several only if a chunk has their tokens and no policy attends some of them in part. layers: of
        each sequence. chunk_size: tokens of a quantum. max_tokens: of the longest prompt. Raises
        torch.OutOfMemoryError."""
        self._decoder = decoder
        self._chunk_size = chunk_size
        self._device = decoder.device
        self._num_tokens = sum(sequence.num_prefill - sequence.num_cached for sequence in sequences)
        self._buffers = self._make_buffers(sequences, offloader, max_tokens)
        super().__init__(self._make_parts(sequences, layers, offloader))
        token_ids = list(chain(*(part.token_ids for part in self._parts)))
        self._hidden = decoder.embed(to_device(np.array(token_ids, dtype=np.int64), self._device))
        spans = [torch.arange(part.first, part.num_tokens, device=self._device) for part in self._parts]
        self._positions = torch.cat(spans)
        # Of several prompts: where their tokens lie, and which rows of the buffers are theirs where that is no run.
        self._packed: Packed | None = None
        self._places: Tensor | None = None
        if len(self._parts) > 1:
            num_queries = [part.end - part.begin for part in self._parts]
            self._packed = Packed.of(num_queries, [part.num_tokens for part in self._parts], self._device)
            if any(part.first for part in self._parts[1:]):
                row_begins = self._packed.row_bounds[:-1].split(1)
                self._places = torch.cat(
                    [begin + span for begin, span in zip(row_begins, spans, strict=True)]
                )
        self._scores: dict[Prompt, PromptScores] = {
            part: PromptScores(part.sequence, decoder, part.sequence.request.sampling.prompt_logprobs or 0)
            for part in self._parts
            if part.sequence.scores_prompt
        }
        self._layer = 0
        self._begin = 0
        self._begun = Mark(self._device)

    @property
    def next_work(self) -> float:
        config, begin, end = self._decoder.config, self._begin, self._next_end
        if self._is_computed:
            return 0.0
        layers = self._next_layers
        has_last = layers.stop == config.num_layers and not self._scores
        spans = [part.positions(begin, end) for part in self._parts]
        work = (len(layers) - has_last) * sum(layer_work(config, span.start, span.stop) for span in spans)
        return work + has_last * sum(last_layer_work(config, span.start, span.stop) for span in spans)

    @property
    def next_kind(self) -> WorkKind:
        if (
            self._scores
            and not self._is_computed
            and self._next_layers.stop == self._decoder.config.num_layers
        ):
            return WorkKind.SCORED
        return WorkKind.SHORT if self._num_tokens <= self._chunk_size else WorkKind.LONG

    @property
    def _next_layers(self) -> range:
        num_layers = max(1, self._quantum_tokens // (self._next_end - self._begin))
        return range(self._layer, min(self._layer + num_layers, self._decoder.config.num_layers))

    def _has_computed(self, prompt: Prompt) -> bool:
        return self._is_computed

    @property
    def _is_computed(self) -> bool:
        return self._layer == self._decoder.config.num_layers

    @property
    def _quantum_tokens(self) -> int:
        """Half as many where they are scored too: others wait no longer for that. Packed prompts are attended whole."""
        is_scoring = self._scores and self._layer == self._decoder.config.num_layers - 1
        is_halved = is_scoring and self._packed is None
        return max(1, self._chunk_size // 2) if is_halved else self._chunk_size

    @property
    def _next_end(self) -> int:
        return min(self._begin + self._quantum_tokens, self._num_tokens)

    @property
    def _rows(self) -> Tensor:
        """All prompts' of the layer that is computed."""
        return self._buffers[self._layer % len(self._buffers)]

    def _run_quantum(self, wait: bool) -> None:
        if self._is_computed and wait:
            self._wait()
        left = self._quantum_tokens
        while self.prompts and not self._is_computed and (end := self._next_end) - self._begin <= left:
            left -= end - self._begin
            if self._begin == 0 and not (self._each(PromptRows.take_known) and self.prompts):
                break
            self._run_chunk(self._begin, end)
            self._begin = end
            if end == self._num_tokens:
                self._finish_layer()
        self._settle()

    def _logits(self, computed: list[Prompt]) -> Tensor:
        for prompt in computed:
            if (scores := self._scores.get(prompt)) is not None:
                self.events.append((prompt.sequence.sequence_id, scores.take_event()))
        ends = {prompt.sequence: prompt.end for prompt in self._parts}
        return self._decoder.logits(
            torch.stack([self._hidden[ends[prompt.sequence] - 1] for prompt in computed])
        )

    def _run_chunk(self, begin: int, end: int) -> None:
        decoder, layer = self._decoder, self._layer
        hidden, positions = self._hidden, self._positions
        if end - begin < self._num_tokens:
            hidden, positions = hidden[begin:end], positions[begin:end]
        first = self._parts[0].first
        rows = self._rows[:, first + begin : first + end] if self._places is None else None
        query, key, value = decoder.project_qkv(layer, hidden, positions, rows)
        if self._places is not None:
            self._rows[:, self._places] = torch.cat((key, value), dim=2).transpose(0, 1)
        for prompt in self.prompts:
            prompt.pass_chunk(query, begin)
        if (attended := self._attend(query, begin)) is not None:
            tokens, attention = attended
            is_whole = len(attention) == self._num_tokens
            finished = decoder.finish_layer(
                layer, self._hidden if is_whole else self._hidden[tokens], attention
            )
            if is_whole:
                self._hidden = finished
            else:
                self._hidden[tokens] = finished
        if self._scores and layer == decoder.config.num_layers - 1:
            self._score(begin, end)

    def _score(self, begin: int, end: int) -> None:
        """The last layer's output of the tokens at [begin, end) is there."""
        for part in self.prompts:
            positions = part.positions(begin, end)
            if positions and (scores := self._scores.get(part)) is not None:
                place = positions.start + part.begin - part.first
                scores.take(self._hidden[place : place + len(positions)], positions.start)

    def _attend(self, query: Tensor, begin: int) -> tuple[slice | Tensor, Tensor] | None:
        """The attention of the tokens with an output that is read, and which these are; None for none. query: [T, H_q,
        d], of the tokens from `begin` on."""
        scale, end = self._decoder.attention_scale, begin + query.shape[0]
        # Nothing reads the last layer's output but the next tokens, and prompts that are scored.
        is_last = self._layer == self._decoder.config.num_layers - 1 and not self._scores
        part = self._parts[0]
        sparse = part.attention(self._layer)
        if self._packed is not None:
            if sparse is None:
                attention = attend_prompts(query, self._rows, self._packed, scale)
            else:
                attention = torch.cat([self._attend_alone(part, query, scale) for part in self._parts])
            if not is_last:
                return slice(begin, end), attention
            last = self._packed.query_bounds[1:].long() - 1
            return last, attention[last]
        if sparse is not None:
            attention = sparse.attend(query, part.rows, part.first + begin, scale)
        elif is_last:
            if end < self._num_tokens:
                return None
            begin = end - 1
            attention = attend_chunk(query[-1:], self._rows, part.first + begin, scale)
        else:
            attention = attend_chunk(query, self._rows, part.first + begin, scale)
        return slice(begin, end), attention

    def _attend_alone(self, part: PromptRows, query: Tensor, scale: float) -> Tensor:
        """One of several packed prompts, in a layer that is not attended densely."""
        attention = part.attention(self._layer)
        assert attention is not None, "packed prompts are served alike"
        return attention.attend(query[part.begin : part.end], part.rows, part.first, scale)

    def _finish_layer(self) -> None:
        begun, ended = self._begun, Mark(self._device)
        self._each(lambda prompt: prompt.finish_layer(begun, ended))
        self._layer, self._begin, self._begun = self._layer + 1, 0, ended

    def _make_buffers(self, sequences: list[Sequence], offloader: Offloader, max_tokens: int) -> list[Tensor]:
        num_rows = sum(buffer_tokens(sequence.num_prefill, max_tokens) for sequence in sequences)
        size = self._decoder.config.num_kv_heads, num_rows
        is_kept = any(sequence in offloader.extents for sequence in sequences)
        num_buffers = 2 if is_kept and offloader.arena.copies_aside else 1
        row_format = self._decoder.row_format
        return [empty_rows(row_format, *size, device=self._device) for _ in range(num_buffers)]

    def _make_parts(
        self, sequences: list[Sequence], layers: list[list[ServedLayer]], offloader: Offloader
    ) -> list[PromptRows]:
        parts: list[PromptRows] = []
        begin = row_begin = 0
        for sequence, of_sequence in zip(sequences, layers, strict=True):
            row_end = row_begin + sequence.num_prefill
            rows = [buffer[:, row_begin:row_end] for buffer in self._buffers]
            share = (sequence.num_prefill - sequence.num_cached) / self._num_tokens
            num_heads = self._decoder.config.num_heads
            parts.append(PromptRows(sequence, of_sequence, offloader, rows, num_heads, begin, share))
            begin, row_begin = parts[-1].end, row_end
        return parts


class PromptScores:
    """Takes the last layer's output as it is computed, and keeps a few numbers of each token until they are emitted.

    Until they are sent, [1 + k] float32 and [1 + k] int64 a token are kept on the host, k of the request, in one piece.
    Many small pieces would lie between logits that are freed, and keep the host's memory from being used again.
    """

    def __init__(self, sequence: Sequence, decoder: Decoder, num_top: int) -> None:
        self._sequence = sequence
        self._decoder = decoder
        self._num_top = min(num_top, decoder.config.vocab_size)
        shape = (len(sequence.request.prompt_token_ids) - 1, 1 + self._num_top)
        is_cuda = decoder.device.type == "cuda"
        self._at_once = scored_at_once(decoder.config.vocab_size, is_cuda)
        self._logprobs = torch.empty(shape, dtype=torch.float32, pin_memory=is_cuda)
        self._numbers = torch.empty(shape, dtype=torch.int64, pin_memory=is_cuda)
        self._copied: Mark | None = None

    def take(self, hidden: Tensor, begin: int) -> None:
        """hidden: [T, hidden_size] of the prompt's tokens from position `begin` on; each says how likely the next is,
        and the prompt's last nothing."""
        token_ids = self._sequence.request.prompt_token_ids[begin + 1 : begin + 1 + len(hidden)]
        for first in range(0, len(token_ids), self._at_once):
            some = np.array(token_ids[first : first + self._at_once], dtype=np.int64)
            of_next = to_device(some, hidden.device)
            logits = self._decoder.logits(hidden[first : first + len(of_next)])
            top_ids = first_k(logits, self._num_top)
            wanted = torch.cat([of_next.unsqueeze(-1), top_ids], dim=-1)
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, wanted)
            numbers = torch.cat([ranks(logits, of_next).unsqueeze(-1), top_ids], dim=-1)
            places = slice(begin + first, begin + first + len(of_next))
            self._logprobs[places].copy_(logprobs, non_blocking=True)
            self._numbers[places].copy_(numbers, non_blocking=True)
        self._copied = Mark(hidden.device)

    def take_event(self) -> PromptEvent:
        """Wait for the numbers, and return them as they are: the service makes messages of them on another thread."""
        if self._copied is not None:
            self._copied.wait()
        # A request that is preempted from here on is not scored again.
        self._sequence.is_scored = True
        token_ids = self._sequence.request.prompt_token_ids[1:]
        return PromptEvent(token_ids, self._logprobs.numpy(), self._numbers.numpy())
