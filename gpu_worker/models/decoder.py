"""The one decoder that every family configures; the engine calls it layer by layer and does the attention."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from gpu_worker.kernels.rms_norm import rms_norm
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.head import project_logits
from gpu_worker.models.layer import DecoderLayer, frozen
from gpu_worker.models.rope import rope_table
from gpu_worker.row_format import row_format
from kv_store.client import RowFormat


class Decoder(torch.nn.Module):
    """A causal transformer decoder for inference, without its attention.

    T is any number of tokens, of any mix of sequences: no method knows of sequences or batches. Callers hold
    `torch.inference_mode`. No method synchronises with the host, so all may be captured in a CUDA graph.
    Weights are uninitialised until `load_model` fills them.
    """

    _rope_table: torch.Tensor

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed_weight = frozen(device, dtype, config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(
            DecoderLayer(config, device, dtype) for _ in range(config.num_layers)
        )
        self.final_norm = frozen(device, dtype, config.hidden_size)
        self.head_weight = (
            self.embed_weight
            if config.tie_word_embeddings
            else frozen(device, dtype, config.vocab_size, config.hidden_size)
        )
        table = rope_table(config.rope, config.max_model_len, device, dtype)
        self.register_buffer("_rope_table", table, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def row_format(self) -> RowFormat:
        """Of the rows that `project_qkv` fills."""
        return row_format(self.config.head_dim, self.dtype)

    @property
    def attention_scale(self) -> float:
        """What the attention multiplies q·k by before its softmax."""
        return self.config.head_dim**-0.5

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [T] to hidden states [T, hidden_size]."""
        return F.embedding(token_ids, self.embed_weight)

    def project_qkv(
        self,
        layer: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of one layer: input norm, projections, bias, q/k norm and RoPE applied.

        `hidden` [T, hidden_size], `positions` int64 [T], each below `config.max_model_len`. Returns queries
        [T, num_heads, head_dim] and keys, values [T, num_kv_heads, head_dim]. They are views into shared
        buffers: a token's heads lie together, the step from token to token may be longer (not so queries and
        keys on a GPU, which are contiguous). `hidden` is only read. rows: [num_kv_heads, T, row_elements], contiguous
        in the last, to be filled with keys and values, of which those that are returned are views then.
        """
        return self._layer(layer).project_qkv(hidden, self._rope_table, positions, rows)

    def finish_layer(self, layer: int, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """A layer's output from its input `hidden` [T, hidden_size] and `attention` [T, num_heads, head_dim].

        Output projection, residual, MLP and residual. Returns [T, hidden_size]; both inputs are only read.
        """
        return self._layer(layer).finish(hidden, attention)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last layer [T, hidden_size] to logits float32 [T, vocab_size]."""
        _, normed = rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)
        return project_logits(normed, self.head_weight)

    def _layer(self, layer: int) -> DecoderLayer:
        return cast(DecoderLayer, self.layers[layer])
