"""The configuration of a model as a frozen record; every field comes validated from its family."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from gpu_worker.errors import ModelError
from gpu_worker.layers import AttentionSpec, LayerSpec, Norm, RmsNorm


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: its layers, and what stands before and behind them.

    eps, norm: of the norm behind the last layer, and its kind.
    max_model_len: tokens up to which the decoder computes what the model does.
    embedding, final_norm, head: tensors of the checkpoint.
    layer_prefix: of a layer's tensors there, before its number.
    text_prefixes, heads: beginnings of the names above, and names of the head, of which a checkpoint has one each.
    skipped: beginnings of the names of tensors that text does not need.
    embedding_scale, logit_scale: factors on embeddings, in the type of the weights, and on logits.
    checkpoint_dtype: the name that config.json gives, if any.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    eps: float
    max_model_len: int
    tie_word_embeddings: bool = False
    embedding: str = "model.embed_tokens.weight"
    layer_prefix: str = "model.layers."
    final_norm: str = "model.norm"
    head: str = "lm_head.weight"
    text_prefixes: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    norm: type[Norm] = RmsNorm
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    checkpoint_dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        kinds = {(each.num_heads, each.num_kv_heads, each.head_dim, each.scale) for each in self.attentions}
        if len(kinds) != 1:
            raise ModelError(
                f"{self.model_type}: layers that differ in their heads or scale of attention are not supported: "
                f"(query heads, KV heads, size of a head, scale) is one of {sorted(kinds)}"
            )

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        return tuple(layer.attention for layer in self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return self.layers[0].attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.layers[0].attention.group_size

    def named_as(self, names: Set[str]) -> ModelConfig:
        """Return the model with the names that a checkpoint has for its tensors."""
        last = self.embedding.removeprefix("model.")
        found = [prefix for prefix in self.text_prefixes if prefix + last in names]
        heads = [name for name in self.heads if name in names]
        config = replace(self, head=heads[0]) if heads else self
        if not found:
            return config
        return replace(
            config,
            embedding=found[0] + last,
            layer_prefix=found[0] + self.layer_prefix.removeprefix("model."),
            final_norm=found[0] + self.final_norm.removeprefix("model."),
        )

    def served_up_to(self, max_model_len: int | None) -> ModelConfig:
        """Return the model for contexts of at most this length, which decides LongRoPE's factors; None: of its own."""
        longest = min(self.max_model_len, max_model_len or self.max_model_len)
        layers = (replace(layer, attention=layer.attention.for_length(longest)) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    def with_attention(self, **changes: Any) -> ModelConfig:
        """Change these fields of every layer's attention."""
        layers = (replace(layer, attention=replace(layer.attention, **changes)) for layer in self.layers)
        return replace(self, layers=tuple(layers))
