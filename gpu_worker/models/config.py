"""What the decoder must know of a model, as frozen records; every field comes validated from its family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: the first `rotary_dim` elements of each head turn by position.

    `interleaved` pairs neighbours (0, 1), (2, 3), ...; otherwise element i pairs with i + rotary_dim / 2. The
    fields after `factor` matter only to the types that use them; `attention_factor` None means the type's own
    default. `frequency_factors`, one for each frequency or none, divide them first, whatever the type.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    interleaved: bool = False
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and options of a decoder.

    `qkv_bias`, `o_bias`, `mlp_bias`: those projections add a bias. `qk_norm`: RMSNorm per head on queries and
    keys before RoPE. `post_norms`: RMSNorm on each block's output before its residual. `fused_gate_up`: the
    checkpoint stores gate and up as one matrix. `sliding_window`: the model was built to see only this many
    last tokens in some layer; None: all. `checkpoint_dtype`: the name that config.json gives, if any.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    fused_gate_up: bool = False
    sliding_window: int | None = None
    checkpoint_dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def max_model_len(self) -> int:
        """Tokens up to which full attention is what the model computes.

        YaRN stretches the trained length by its factor. A sliding window caps it: up to the window's length
        sliding and full attention are the same, beyond it they are not.
        """
        length = self.max_position_embeddings
        if self.rope.rope_type == "yarn":
            length = max(length, int(self.rope.original_max_position_embeddings * self.rope.factor))
        return length if self.sliding_window is None else min(length, self.sliding_window)
