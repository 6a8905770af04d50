"""Shapes of models by name. A benchmark fills them with random weights: speed asks for the shape only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """A Llama. `rope_factor` 1 is plain RoPE; above, Llama 3.1's scaling from `original_max_len` on."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_len: int
    rope_theta: float
    rope_factor: float = 1.0
    original_max_len: int = 8192
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-5

    @property
    def num_weights(self) -> int:
        """Elements of all matrices; norms are left out."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        num_tables = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + num_tables * self.vocab_size * self.hidden_size

    def kv_bytes(self, num_tokens: int, row_bytes: int) -> int:
        """The whole KV cache of `num_tokens` tokens."""
        return self.num_layers * self.num_kv_heads * row_bytes * num_tokens

    def config_fields(self, max_len: int | None = None) -> dict[str, Any]:
        """A Hugging Face config.json; `max_len` stretches the positions that the shape has by itself."""
        length = max(self.max_len, max_len or 0)
        scaling = {
            "rope_type": "llama3",
            "factor": self.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": self.original_max_len,
        }
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling if self.rope_factor > 1 else None,
            "max_position_embeddings": length,
            "tie_word_embeddings": self.tie_word_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "bfloat16",
        }


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, 131072, 500000.0, rope_factor=8.0),
        # the same, and a smaller one whose cache of a million tokens fits most hosts, with positions for a million: the
        # models' own end at 131072
        ModelShape(
            "llama-3.1-8b-1m", 32, 4096, 32, 8, 128, 14336, 128256, 1 << 20, 500000.0, rope_factor=8.0
        ),
        ModelShape(
            "llama-3.2-1b-1m",
            16,
            2048,
            32,
            8,
            64,
            8192,
            128256,
            1 << 20,
            500000.0,
            rope_factor=32.0,
            tie_word_embeddings=True,
        ),
        # the bundled model's
        ModelShape("nano", 8, 384, 6, 2, 64, 1024, 8192, 32768, 1e6, tie_word_embeddings=True),
        # for tests
        ModelShape("tiny", 2, 64, 4, 2, 16, 128, 128, 2048, 10000.0),
    )
}
