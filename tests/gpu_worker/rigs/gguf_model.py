"""Writes a transformers model as a GGUF file, as others' converters do: names and writer are the package's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

# what llama.cpp turns by neighbours, so that its files hold their rows in another order
TURNED_BY_NEIGHBOURS = ("llama", "mistral", "mistral3", "granite", "smollm3", "arcee")
# Where a file's architecture is not the family's name, or the package does not know it.
ARCHITECTURES = {"ministral3": "mistral3", "hunyuan_v1_dense": "hunyuan-dense"}
TENSORS = {"mistral": "llama"}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: Kind = Kind.F32,
    extra: Mapping[str, torch.Tensor] | None = None,
    **changes: object,
) -> Path:
    """A file of `model` with matrices of `kind`, to whose values the model's own are rounded. extra: tensors that no
    model has. changes: metadata by key, `__` for a dot; None leaves a key out."""
    config = model.config
    arch = changes.pop("arch", known := ARCHITECTURES.get(config.model_type, config.model_type))
    kinds = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[TENSORS.get(known, known)], config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata(model, arch) | {k.replace("__", "."): v for k, v in changes.items()}).items():
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        if value is not None:
            add[type(value)](key, value)
    for length in ("short", "long"):
        if factors := config.rope_parameters.get(f"{length}_factor"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(factors, dtype=np.float32))
    if config.rope_parameters.get("rope_type") == "llama3":
        factors = frequency_factors(model)
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            stored = Kind.F32 if weight.dim() == 1 else kind
            data = gguf.quantize(weight.numpy(), stored)
            weight.copy_(torch.from_numpy(gguf.dequantize(data, stored).copy()))
            if arch in TURNED_BY_NEIGHBOURS and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
                heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=stored)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(model: PreTrainedModel, arch: str) -> dict[str, object]:
    config = model.config
    rope = config.rope_parameters
    values: dict[str, object] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "rope.freq_base": rope_base(model),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
        values["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        values["rope.scaling.yarn_log_multiplier"] = rope.get("mscale_all_dim")
        values["attention.temperature_scale"] = rope.get("llama_4_scaling_beta")
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
        values["rope.scaling.attn_factor"] = math.sqrt(
            1 + math.log(config.max_position_embeddings / original) / math.log(original)
        )
    if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        values["rope.dimension_count"] = int(part * head_dim)
    multipliers = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    values |= {key: getattr(config, name, None) for key, name in multipliers.items()}
    return {f"{arch}.{key}": value for key, value in values.items()} | {
        "tokenizer.ggml.eos_token_id": config.eos_token_id
    }


def rope_base(model: PreTrainedModel) -> float:
    """The base of a model's RoPE, which Hunyuan's `alpha` raises."""
    rope, head_dim = model.config.rope_parameters, getattr(model.config, "head_dim", 4)
    return float(rope["rope_theta"] * rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2)))


def frequency_factors(model: PreTrainedModel) -> torch.Tensor:
    """float32 [d / 2]: by how much the model's RoPE is slower than plain RoPE."""
    found = model.model.rotary_emb.inv_freq
    exponents = torch.arange(0, 2 * len(found), 2, dtype=torch.float32) / (2 * len(found))
    return 1.0 / model.config.rope_parameters["rope_theta"] ** exponents / found
