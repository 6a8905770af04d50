"""The one decoder that every family configures; the engine calls it layer by layer and does the attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from gpu_worker.layers.block import ALONE, Rank, Target
from gpu_worker.layers.embedding import Embedding
from gpu_worker.layers.norm import normed, scaled
from gpu_worker.layers.rope import Rope
from gpu_worker.layers.weights import Matrix, WeightFormat
from gpu_worker.models.config import ModelConfig
from gpu_worker.row_format import row_format
from kv_store.client import RowFormat


class Decoder(torch.nn.Module):
    """A causal transformer decoder for inference, without its attention.

    T is any number of tokens, of any mix of sequences: no method knows of sequences or batches. Callers hold
    `torch.inference_mode`. No method synchronises with the host, so all may be captured in a CUDA graph.
    Weights are uninitialised until `load_model` fills them. rank: whose shard of the layers this is. formats: how the
    checkpoint stores matrices, by their modules.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        rank: Rank = ALONE,
        formats: Mapping[str, WeightFormat] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.config = config
        target = Target(device, dtype, rank, formats)
        shape = (config.vocab_size, config.hidden_size)
        # models are trained with a factor of the weights' type
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.embedding = Embedding(config.embedding, shape, target)
        self.head = self.embedding if config.tie_word_embeddings else Embedding(config.head, shape, target)
        # layers with equal settings share a table
        settings = {each.rope for each in config.attentions}
        ropes = {each: Rope(each, config.max_model_len, target) for each in settings}
        layers = [
            spec.build(f"{config.layer_prefix}{index}.", ropes[spec.attention.rope], target)
            for index, spec in enumerate(config.layers)
        ]
        self.layers = torch.nn.ModuleList(layers)
        # a plain list: looking into a ModuleList takes a microsecond
        self._layers = layers
        self.final_norm = config.norm(config.final_norm, config.hidden_size, config.eps, target)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def product_bytes(self) -> int:
        """Most temporary bytes of a projection in addition to its inputs and outputs."""
        return max(matrix.product_bytes for matrix in self._matrices())

    @property
    def packed_kinds(self) -> tuple[str, ...]:
        """Names of the kinds of packed matrices among the projections', each of which rounds products differently."""
        return tuple(sorted({type(each).__name__ for each in self._matrices() if each.num_packed}))

    @property
    def num_parameters(self) -> int:
        """Numbers of all weights, however they are held; of a tied head once."""
        return sum(each.numel() for each in self.parameters()) + sum(
            each.num_packed for each in self._matrices()
        )

    def _matrices(self) -> Iterator[Matrix]:
        return (module for module in self.modules() if isinstance(module, Matrix))

    @property
    def row_format(self) -> RowFormat:
        """The format of the rows that `project_qkv` fills."""
        return row_format(self.config.head_dim, self.dtype)

    @property
    def attention_scale(self) -> float:
        """The factor on q·k before the softmax, of every layer."""
        return self.config.layers[0].attention.scale

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [T] to hidden states [T, hidden_size]."""
        return scaled(self.embedding.embed(token_ids), self._embedding_scale)

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
        return self._layers[layer].project_qkv(hidden, positions, rows)

    def finish_layer(self, layer: int, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """A layer's output from its input `hidden` [T, hidden_size] and `attention` [T, num_heads, head_dim].

        Output projection, residual, MLP and residual. Returns [T, hidden_size]; both inputs are only read.
        """
        return self._layers[layer].finish(hidden, attention)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last layer [T, hidden_size] to logits float32 [T, vocab_size]."""
        return scaled(self.head.logits(normed(hidden, self.final_norm)), self.config.logit_scale)
