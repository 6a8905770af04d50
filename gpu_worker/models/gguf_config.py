"""A GGUF file's facts about its model, by the names of config.json: the families read both alike."""

from __future__ import annotations

from carrel.process.gguf_file import GGUFHead
from gpu_worker.errors import ModelError
from gpu_worker.models.config_fields import ConfigFields

# general.architecture -> model_type
ARCHITECTURES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
EMBEDDING, HEAD, FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"

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
}
_SCALING_KEYS = {
    "rope_type": "type",
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
# an answer may end with any of these
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")
_CONTROL_TOKEN = 3
_TYPE_NAMES = {0: "float32", 1: "float16"}


def gguf_fields(head: GGUFHead) -> ConfigFields:
    """The fields of a config.json for this file. Errors of a field name the file's own key. Raises ModelError."""
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
    turned = get("rope.dimension_count")
    values["head_dim"] = values["head_dim"] or turned
    if turned not in (None, values["head_dim"]):
        raise ModelError(
            f"{head.path}: RoPE turns {turned} elements of a head of {values['head_dim']}; supported: all of them"
        )
    # an older file says 0 for none
    values["sliding_window"] = values["sliding_window"] or None
    is_sliding = values["sliding_window"] is not None
    embedding = head.tensors.get(EMBEDDING)
    values |= {
        # of these two only Mistral's can slide
        "model_type": "mistral" if architecture == "llama" and is_sliding else ARCHITECTURES[architecture],
        "use_sliding_window": is_sliding,
        "vocab_size": embedding.shape[0] if embedding else None,
        "tie_word_embeddings": HEAD not in head.tensors,
        "attention_bias": "blk.0.attn_q.bias" in head.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in head.tensors,
        "rope_scaling": _rope_scaling(head),
        "dtype": _dtype(head),
        "eos_token_id": _end_tokens(head),
    }
    spelled = {field: f"{architecture}.{key}" for field, key in _KEYS.items()} | {"vocab_size": EMBEDDING}
    return ConfigFields(values, str(head.path), spelled)


def _rope_scaling(head: GGUFHead) -> dict[str, object] | None:
    prefix = f"{head.architecture}.rope.scaling"
    found = {field: head.metadata.get(f"{prefix}.{key}") for field, key in _SCALING_KEYS.items()}
    if found["rope_type"] in (None, "none"):
        return None
    temperature = head.metadata.get(f"{prefix}.attn_factor", 1.0)
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
