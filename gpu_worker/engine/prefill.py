"""Layer-major prefill: all chunks of one layer, then the next layer."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_worker.engine.caches import Cache
from gpu_worker.engine.caches.selection import recall_policy
from gpu_worker.engine.offload import Offloader, TrainedLayer
from gpu_worker.engine.sequence import Sequence
from gpu_worker.kernels.prefill_attention import attend_chunk
from gpu_worker.models import Decoder


class Prefill:
    """One prompt on its way through the layers. A quantum is one (layer, chunk); `advance` does one.

    Between quanta the hidden states of the whole prompt, [n, hidden], and one layer's rows, [H_kv, n, 2d], are kept.
    """

    def __init__(
        self,
        sequence: Sequence,
        decoder: Decoder,
        caches: list[Cache],
        offloader: Offloader,
        chunk_size: int,
        row_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        config = decoder.config
        self.sequence = sequence
        self._decoder = decoder
        self._caches = caches
        self._offloader = offloader
        self._chunk_size = chunk_size
        token_ids = torch.tensor(sequence.request.prompt_token_ids[: sequence.num_prefill], device=device)
        self._num_tokens = token_ids.shape[0]
        self._hidden = decoder.embed(token_ids)
        self._rows = torch.empty(
            config.num_kv_heads, self._num_tokens, 2 * config.head_dim, dtype=row_dtype, device=device
        )
        self._layer = 0
        self._begin = 0
        # Indexes that the store trains while later layers compute.
        self.trained: list[TrainedLayer] = []

    @property
    def is_done(self) -> bool:
        return self._layer == self._decoder.config.num_layers

    @property
    def prefilled_tokens(self) -> int:
        """Done layers' share of the prompt, in tokens."""
        return self._layer * self._num_tokens // self._decoder.config.num_layers

    def advance(self) -> None:
        """One quantum. Raises StoreUnavailable when the layer's rows cannot be offloaded."""
        end = min(self._begin + self._chunk_size, self._num_tokens)
        self._run_chunk(self._begin, end)
        self._begin = end
        if end == self._num_tokens:
            self._finish_layer()

    def logits(self) -> Tensor:
        """Of the token after the prompt: float32 [vocab]. Only when done."""
        return self._decoder.logits(self._hidden[-1:])[0]

    def _run_chunk(self, begin: int, end: int) -> None:
        decoder, layer = self._decoder, self._layer
        positions = torch.arange(begin, end, device=self._hidden.device)
        query, key, value = decoder.project_qkv(layer, self._hidden[begin:end], positions)
        head_dim = decoder.config.head_dim
        self._rows[:, begin:end, :head_dim] = key.transpose(0, 1)
        self._rows[:, begin:end, head_dim:] = value.transpose(0, 1)
        if layer == decoder.config.num_layers - 1:
            # Nothing reads the last layer's output but the next token.
            if end < self._num_tokens:
                return
            begin, query = end - 1, query[-1:]
        attention = attend_chunk(query, self._rows, begin, decoder.attention_scale)
        self._hidden[begin:end] = decoder.finish_layer(layer, self._hidden[begin:end], attention)

    def _finish_layer(self) -> None:
        sequence, layer = self.sequence, self._layer
        if sequence.offloads:
            self._offloader.put_layer(sequence, layer, self._rows)
            self._ask_for_index(layer)
        self._caches[layer].store(sequence, layer, self._rows)
        self._layer, self._begin = layer + 1, 0
        sequence.num_tokens = self._num_tokens if self.is_done else 0

    def _ask_for_index(self, layer: int) -> None:
        sequence = self.sequence
        if not sequence.plan.selects or not self._caches[layer].is_indexed:
            return
        job = recall_policy(sequence).index_job(sequence.plan, sequence.plan.num_sink, sequence.window_begin)
        if job is not None:
            self.trained.append(self._offloader.build(sequence, layer, job))
