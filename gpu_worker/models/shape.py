"""The fields of config.json that all families share, and the blocks that they describe.

A family's file composes layers of these, and of what differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.errors import ModelError
from gpu_worker.layers import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, RopeSpec, Source, Split
from gpu_worker.layers.rope import ROPE_TYPES
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields

MAX_POSITIONS = 1 << 24
_NEEDED_BY = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


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
        self, *, qkv_bias: bool = False, output_bias: bool = False, head_norms: bool = False
    ) -> AttentionSpec:
        """Projections q, k, v and o. head_norms: RMSNorm of each query and key head."""
        num_queries, num_keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {"q": num_queries, "k": num_keys, "v": num_keys}
        sources = tuple(Source(f"self_attn.{which}_proj", (size,)) for which, size in sizes.items())
        output = (Source("self_attn.o_proj", (self.hidden_size,)),)
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            qkv=LinearSpec(self.hidden_size, sources, qkv_bias),
            output=LinearSpec(num_queries, output, output_bias, Split.COLUMNS),
            scale=self.head_dim**-0.5,
            rope=self.rope,
            q_norm="self_attn.q_norm" if head_norms else None,
            k_norm="self_attn.k_norm" if head_norms else None,
        )

    def gated_mlp(self, *, bias: bool = False, fused: bool = False) -> MlpSpec:
        """SiLU-gated MLP. fused: the checkpoint stores gate and up as one matrix."""
        size = self.intermediate_size
        apart = Source("mlp.gate_proj", (size,)), Source("mlp.up_proj", (size,))
        up = (Source("mlp.gate_up_proj", (size, size)),) if fused else apart
        down = (Source("mlp.down_proj", (self.hidden_size,)),)
        return MlpSpec(LinearSpec(self.hidden_size, up, bias), LinearSpec(size, down, bias, Split.COLUMNS))

    def model(self, layer: LayerSpec, window: int | None = None) -> ModelConfig:
        """A model of such layers. window: tokens that some of them see; None for all.

        Up to the window's length sliding and full attention are the same, so the model is served up to there.
        """
        return ModelConfig(
            model_type=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=(layer,) * self.num_layers,
            eps=self.eps,
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
    activations: tuple[str, ...] = ("silu", "swish"),
) -> Shape:
    """Read and check the shared fields. Raises ModelError.

    interleaved, partial_rotary_factor: how the family's RoPE turns.
    activations: the names of the family's `hidden_act`, the first where config.json has none.
    """
    if fields.has("quantization_config"):
        raise fields.fail("quantization_config", "no quantised weights: give the unquantised model")
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
    rope = _read_rope(fields, head_dim, max_position_embeddings, interleaved, partial_rotary_factor)
    return Shape(
        model_type=fields.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 20),
        num_layers=fields.integer("num_hidden_layers", 1, 1 << 12),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=fields.number("rms_norm_eps", 0.0, 1.0),
        rope=rope,
        max_model_len=_max_model_len(rope, max_position_embeddings),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        checkpoint_dtype=fields.text("dtype" if fields.has("dtype") else "torch_dtype", "") or None,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
    )


def _max_model_len(rope: RopeSpec, max_position_embeddings: int) -> int:
    """YaRN stretches the trained length by its factor."""
    if rope.rope_type != "yarn":
        return max_position_embeddings
    return max(max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))


def _read_rope(
    fields: ConfigFields, head_dim: int, max_positions: int, interleaved: bool, partial_rotary_factor: float
) -> RopeSpec:
    # transformers 5 writes rope_parameters; before, rope_scaling with rope_theta next to it
    settings = fields.object("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    rope_type = settings.choice("rope_type" if settings.has("rope_type") else "type", ROPE_TYPES, "default")
    for name, value in settings.items():
        if isinstance(value, (dict, list)):
            raise settings.fail(
                name, "a single value: RoPE settings that differ between layers are not supported"
            )
    theta = fields.number("rope_theta", 2.0, 1e15, default=10000.0)
    partial = fields.number("partial_rotary_factor", 0.0, 1.0, default=partial_rotary_factor)
    partial = settings.number("partial_rotary_factor", 0.0, 1.0, default=partial)
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"{fields.where}: partial_rotary_factor {partial:g} rotates {rotary_dim} elements "
            f"of a head of {head_dim}; expected an even number from 2"
        )
    for name in _NEEDED_BY.get(rope_type, ()):
        if not settings.has(name):
            raise settings.fail(name, f"a number, which RoPE type {rope_type!r} needs")
    low_freq_factor = settings.number("low_freq_factor", 0.0, 1e6, default=1.0)
    high_freq_factor = settings.number("high_freq_factor", 0.0, 1e6, default=4.0)
    if high_freq_factor <= low_freq_factor:
        raise settings.fail("high_freq_factor", f"more than low_freq_factor, {low_freq_factor:g}")
    return RopeSpec(
        rope_type=rope_type,
        theta=settings.number("rope_theta", 2.0, 1e15, default=theta),
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        factor=settings.number("factor", 1.0, 1e4, default=1.0),
        original_max_position_embeddings=settings.integer(
            "original_max_position_embeddings", 1, MAX_POSITIONS, default=max_positions
        ),
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        beta_fast=settings.number("beta_fast", 1e-6, 1e6, default=32.0),
        beta_slow=settings.number("beta_slow", 1e-6, 1e6, default=1.0),
        mscale=_optional(settings, "mscale"),
        mscale_all_dim=_optional(settings, "mscale_all_dim"),
        attention_factor=_optional(settings, "attention_factor"),
        truncate=settings.flag("truncate", default=True),
    )


def _optional(settings: ConfigFields, name: str) -> float | None:
    return settings.number(name, 0.0, 1e6) if settings.has(name) else None
