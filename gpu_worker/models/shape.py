"""The fields of config.json that all families share, and the blocks that they describe.

A family's file composes layers of these, and of what differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.layers import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, RopeSpec, Source, Split
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.rope_fields import MAX_POSITIONS, max_model_len, read_rope


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder of the Llama line, whose layers are alike. max_model_len: without sliding windows."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: RopeSpec
    max_model_len: int
    tie_word_embeddings: bool = False
    checkpoint_dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()

    def attention(
        self,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        head_norms: bool = False,
        fused: bool = False,
    ) -> AttentionSpec:
        """Projections q, k, v and o. head_norms: RMSNorm of each query and key head. fused: the checkpoint stores q, k
        and v as one matrix."""
        num_queries, num_keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {"q": num_queries, "k": num_keys, "v": num_keys}
        apart = tuple(Source(f"self_attn.{which}_proj", (size,)) for which, size in sizes.items())
        sources = (Source("self_attn.qkv_proj", tuple(sizes.values())),) if fused else apart
        output = (Source("self_attn.o_proj", (self.hidden_size,)),)
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            qkv=LinearSpec(self.hidden_size, sources, qkv_bias),
            output=LinearSpec(num_queries, output, output_bias, Split.COLUMNS),
            scale=self.head_dim**-0.5,
            rope=self.rope,
            head_norms=("self_attn.q_norm", "self_attn.k_norm") if head_norms else None,
        )

    def gated_mlp(self, activation: str = "silu_mul", *, bias: bool = False, fused: bool = False) -> MlpSpec:
        """MLP with a gate. activation: a name of `ACTIVATIONS`. fused: the checkpoint has gate and up in one matrix."""
        size = self.intermediate_size
        apart = Source("mlp.gate_proj", (size,)), Source("mlp.up_proj", (size,))
        up = (Source("mlp.gate_up_proj", (size, size)),) if fused else apart
        down = (Source("mlp.down_proj", (self.hidden_size,)),)
        return MlpSpec(
            LinearSpec(self.hidden_size, up, bias),
            LinearSpec(size, down, bias, Split.COLUMNS),
            activation,
        )

    def plain_mlp(
        self, activation: str, *, bias: bool = False, names: tuple[str, str] = ("up_proj", "down_proj")
    ) -> MlpSpec:
        """MLP without a gate. activation: a name of `ACTIVATIONS`. names: of its modules."""
        size = self.intermediate_size
        up, down = Source(f"mlp.{names[0]}", (size,)), Source(f"mlp.{names[1]}", (self.hidden_size,))
        return MlpSpec(
            LinearSpec(self.hidden_size, (up,), bias),
            LinearSpec(size, (down,), bias, Split.COLUMNS),
            activation,
        )

    def model(self, layer: LayerSpec, window: int | None = None) -> ModelConfig:
        """A model of such layers. window: tokens that some of them see; None for all.

        Up to the window's length sliding and full attention are the same, so the model is served up to there.
        """
        return ModelConfig(
            model_type=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=(layer,) * self.num_layers,
            eps=layer.eps,
            norm=layer.norm,
            max_model_len=self.max_model_len if window is None else min(self.max_model_len, window),
            tie_word_embeddings=self.tie_word_embeddings,
            checkpoint_dtype=self.checkpoint_dtype,
            eos_token_ids=self.eos_token_ids,
        )


def read_shape(
    fields: ConfigFields,
    *,
    interleaved: bool = False,
    partial_rotary_factor: float = 1.0,
    rope_theta: float = 10000.0,
    activations: tuple[str, ...] = ("silu", "swish"),
    tied: bool = False,
    eps: str = "rms_norm_eps",
) -> Shape:
    """Read and check the shared fields. Raises ModelError.

    interleaved: the family's RoPE turns neighbours.
    activations: the names of the family's `hidden_act`, the first where config.json has none.
    eps: the field of that name.
    partial_rotary_factor, rope_theta, tied: what the family means where config.json says nothing.
    """
    if fields.text("hidden_act", activations[0]) not in activations:
        raise fields.fail("hidden_act", repr(activations[0]))
    hidden_size = fields.integer("hidden_size", 1, 1 << 17)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.fail("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    head_dim = fields.integer("head_dim", 2, 1 << 12, default=hidden_size // num_heads)
    if head_dim % 2:
        raise fields.fail("head_dim", "an even number")
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    max_position_embeddings = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    rope = read_rope(
        fields,
        head_dim,
        interleaved=interleaved,
        partial_rotary_factor=partial_rotary_factor,
        theta=rope_theta,
    )
    return Shape(
        model_type=fields.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 20),
        num_layers=fields.integer("num_hidden_layers", 1, 1 << 12),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=fields.number(eps, 0.0, 1.0),
        rope=rope,
        max_model_len=max_model_len(rope, max_position_embeddings),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=tied),
        checkpoint_dtype=fields.text("dtype" if fields.has("dtype") else "torch_dtype", "") or None,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
    )


def read_window(fields: ConfigFields) -> int | None:
    """Return the sliding window of a family that slides wherever `sliding_window` is a number."""
    return fields.integer("sliding_window", 1, MAX_POSITIONS) if fields.has("sliding_window") else None
