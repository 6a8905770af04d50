"""A GGUF file's facts about its model, by the names of config.json: the families read both alike."""

from __future__ import annotations

from collections.abc import Mapping

from carrel.process.gguf_file import GGUFHead
from gpu_worker.errors import ModelError
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.gguf_architectures import ARCHITECTURES

EMBEDDING, HEAD, FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"
# of LongRoPE: field of config.json -> tensor
LONG_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}

# field of config.json -> key, after the architecture's name
_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_OF_WIDTH = ("num_attention_heads", "hidden_size")
_SCALING_KEYS = {
    "rope_type": "type",
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    # both are 1 in the models that have them
    "mscale": "yarn_log_multiplier",
    "mscale_all_dim": "yarn_log_multiplier",
}
# an answer may end with any of these
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")
_CONTROL_TOKEN = 3
_TYPE_NAMES = {0: "float32", 1: "float16"}


def gguf_fields(head: GGUFHead, factors: Mapping[str, object]) -> ConfigFields:
    """Return the fields of a config.json for this file. Errors of a field name the file's own key. Raises ModelError.

    factors: LongRoPE's, by their names in config.json; empty where the file has none.
    """
    architecture = head.architecture
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{head.path}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )

    def get(key: str) -> object:
        return head.metadata.get(f"{architecture}.{key}")

    if get("expert_count"):
        raise ModelError(f"{head.path} is a mixture of {get('expert_count')} experts, which is not supported")
    values = {field: get(key) for field, key in _KEYS.items()}
    values |= _head_sizes(head, get("attention.key_length"), get("rope.dimension_count"))
    # an older file says 0 for none
    values["sliding_window"] = values["sliding_window"] or None
    is_sliding = values["sliding_window"] is not None
    embedding = head.tensors.get(EMBEDDING)
    values |= {
        # of these two only Mistral's can slide
        "model_type": "mistral"
        if architecture == "llama" and is_sliding
        else ARCHITECTURES[architecture].model_type,
        "use_sliding_window": is_sliding,
        "vocab_size": embedding.shape[0] if embedding else None,
        "tie_word_embeddings": HEAD not in head.tensors,
        "attention_bias": "blk.0.attn_q.bias" in head.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in head.tensors,
        "use_bias": "blk.0.attn_q.bias" in head.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in head.tensors,
        "rope_scaling": _rope_scaling(head, factors),
        "dtype": _dtype(head),
        "eos_token_id": _end_tokens(head),
    }
    spelled = {field: f"{architecture}.{key}" for field, key in _KEYS.items()} | {"vocab_size": EMBEDDING}
    return ConfigFields(values, str(head.path), spelled)


def _head_sizes(head: GGUFHead, head_dim: object, turned: object) -> dict[str, object]:
    """Return the size of a head and the part of it that RoPE turns, by the names of config.json."""
    architecture = ARCHITECTURES[head.architecture]
    if not architecture.turns_part:
        head_dim = head_dim or turned
        if turned not in (None, head_dim):
            raise ModelError(
                f"{head.path}: RoPE turns {turned} elements of a head of {head_dim}; supported: all of them"
            )
        return {"head_dim": head_dim}
    if f"{head.architecture}.rope.dimension_sections" in head.metadata:
        raise ModelError(f"{head.path}: RoPE with axes is not supported for {head.architecture!r}")
    heads, width = (head.metadata.get(f"{head.architecture}.{_KEYS[name]}") for name in _OF_WIDTH)
    if head_dim is None and isinstance(heads, int) and isinstance(width, int) and heads:
        head_dim = width // heads
    if not isinstance(turned, int) or not isinstance(head_dim, int) or not head_dim:
        return {"head_dim": head_dim}
    return {"head_dim": head_dim, "partial_rotary_factor": turned / head_dim}


def _rope_scaling(head: GGUFHead, factors: Mapping[str, object]) -> dict[str, object] | None:
    prefix = f"{head.architecture}.rope.scaling"
    found = {field: head.metadata.get(f"{prefix}.{key}") for field, key in _SCALING_KEYS.items()}
    found["llama_4_scaling_beta"] = head.metadata.get(f"{head.architecture}.attention.temperature_scale")
    temperature = head.metadata.get(f"{prefix}.attn_factor", 1.0)
    if factors and ARCHITECTURES[head.architecture].scales_long:
        return found | {"rope_type": "longrope", "attention_factor": temperature, **factors}
    if found["rope_type"] in (None, "none"):
        return None
    if temperature != 1.0:
        raise ModelError(f"{head.path}: {prefix}.attn_factor is {temperature}; supported: 1, or none")
    return found


def _dtype(head: GGUFHead) -> str:
    """The type to compute in where none is asked for: that of the matrices, or bfloat16 for quantised ones."""
    types = {place.type_id for place in head.tensors.values() if len(place.shape) > 1}
    return _TYPE_NAMES.get(min(types), "bfloat16") if len(types) == 1 else "bfloat16"


def _end_tokens(head: GGUFHead) -> list[object]:
    """The file names one as a rule; the others that families write are found by their texts."""
    named = [head.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    ids: list[object] = [token_id for token_id in named if token_id is not None]
    texts, kinds = (head.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(texts, list) and isinstance(kinds, list):
        both = enumerate(zip(texts, kinds, strict=False))
        ids += [i for i, (text, kind) in both if kind == _CONTROL_TOKEN and text in _END_TOKENS]
    return list(dict.fromkeys(ids))
