"""Which tensor of a Hugging Face checkpoint fills which rows of which decoder weight."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.models.config import ModelConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Rows `start_row` onwards of the decoder weight `parameter`; `shape` is the checkpoint tensor's."""

    parameter: str
    start_row: int
    shape: tuple[int, ...]


def weight_slices(config: ModelConfig) -> dict[str, WeightSlice]:
    """Every tensor that a checkpoint of this model must have, by its name there."""
    slices = {
        EMBEDDING: WeightSlice("embed_weight", 0, (config.vocab_size, config.hidden_size)),
        "model.norm.weight": WeightSlice("final_norm", 0, (config.hidden_size,)),
    }
    if not config.tie_word_embeddings:
        slices[HEAD] = WeightSlice("head_weight", 0, (config.vocab_size, config.hidden_size))
    for layer in range(config.num_layers):
        for name, part in _layer_slices(config).items():
            target = WeightSlice(f"layers.{layer}.{part.parameter}", part.start_row, part.shape)
            slices[f"model.layers.{layer}.{name}"] = target
    return slices


def is_ignorable(name: str, config: ModelConfig) -> bool:
    """Return whether nothing needs this tensor: RoPE frequencies, which follow from the configuration, and a tied head.

    The loader unties a head that differs from the embedding.
    """
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == HEAD)


def _layer_slices(config: ModelConfig) -> dict[str, WeightSlice]:
    hidden, mlp = config.hidden_size, config.intermediate_size
    num_q_rows, num_kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {
        "input_layernorm.weight": WeightSlice("input_norm", 0, (hidden,)),
        "post_attention_layernorm.weight": WeightSlice("mlp_norm", 0, (hidden,)),
        "self_attn.o_proj.weight": WeightSlice("o_weight", 0, (hidden, num_q_rows)),
        "mlp.down_proj.weight": WeightSlice("down_weight", 0, (hidden, mlp)),
    }
    row = 0
    for name, num_rows in (("q", num_q_rows), ("k", num_kv_rows), ("v", num_kv_rows)):
        parts[f"self_attn.{name}_proj.weight"] = WeightSlice("qkv_weight", row, (num_rows, hidden))
        if config.qkv_bias:
            parts[f"self_attn.{name}_proj.bias"] = WeightSlice("qkv_bias", row, (num_rows,))
        row += num_rows
    halves = (("gate_up", 0, 2 * mlp),) if config.fused_gate_up else (("gate", 0, mlp), ("up", mlp, mlp))
    for name, row, num_rows in halves:
        parts[f"mlp.{name}_proj.weight"] = WeightSlice("gate_up_weight", row, (num_rows, hidden))
        if config.mlp_bias:
            parts[f"mlp.{name}_proj.bias"] = WeightSlice("gate_up_bias", row, (num_rows,))
    if config.mlp_bias:
        parts["mlp.down_proj.bias"] = WeightSlice("down_bias", 0, (hidden,))
    if config.o_bias:
        parts["self_attn.o_proj.bias"] = WeightSlice("o_bias", 0, (hidden,))
    if config.qk_norm:
        parts["self_attn.q_norm.weight"] = WeightSlice("q_norm", 0, (config.head_dim,))
        parts["self_attn.k_norm.weight"] = WeightSlice("k_norm", 0, (config.head_dim,))
    if config.post_norms:
        parts["post_self_attn_layernorm.weight"] = WeightSlice("post_attention_norm", 0, (hidden,))
        parts["post_mlp_layernorm.weight"] = WeightSlice("post_mlp_norm", 0, (hidden,))
    return parts
