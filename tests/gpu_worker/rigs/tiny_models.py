"""Tiny random models made and saved by transformers, the rival that ours must equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    Jais2Config,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3VLConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

VOCAB_SIZE = 101
MAX_POSITIONS = 256

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.3,
}

_VISION: dict[str, object] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "head_dim": 8,
    "out_hidden_size": 48,
}


def _mrope(*sections: int) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}


def _longrope(num_frequencies: int) -> dict[str, object]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(num_frequencies)],
        "long_factor": [1.5 + 0.7 * i for i in range(num_frequencies)],
    }


_GROWING = _YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}


def _shape(**changes: object) -> dict[str, object]:
    return {**_SHAPE, **changes}


# name -> config; group sizes 1, 3 and 4, heads wider and narrower than hidden / heads, tied and untied
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama-group1": lambda: LlamaConfig(**_shape(num_key_value_heads=6)),
    "llama-linear-biases": lambda: LlamaConfig(
        **_shape(attention_bias=True, mlp_bias=True),
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama-dynamic": lambda: LlamaConfig(
        **_shape(), rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama-3-group4-tied": lambda: LlamaConfig(
        **_shape(num_attention_heads=4, num_key_value_heads=1, head_dim=20, tie_word_embeddings=True),
        rope_parameters=_LLAMA3,
    ),
    "mistral": lambda: MistralConfig(**_shape(head_dim=16), sliding_window=None),
    "qwen2-tied": lambda: Qwen2Config(**_shape(tie_word_embeddings=True)),
    "qwen2-yarn": lambda: Qwen2Config(**_shape(), rope_parameters=_YARN),
    "qwen3": lambda: Qwen3Config(**_shape(head_dim=16)),
    "qwen3-biases": lambda: Qwen3Config(**_shape(head_dim=16, attention_bias=True)),
    "glm": lambda: GlmConfig(**_shape(head_dim=16)),
    "glm4": lambda: Glm4Config(**_shape(head_dim=16, num_attention_heads=4, num_key_value_heads=1)),
    "glm4-no-bias": lambda: Glm4Config(**_shape(head_dim=12, attention_bias=False)),
    "phi3": lambda: Phi3Config(**_shape(num_attention_heads=4)),
    "phi3-4-mini": lambda: Phi3Config(
        **_shape(num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True),
        original_max_position_embeddings=MAX_POSITIONS,
        rope_parameters=_longrope(6) | {"partial_rotary_factor": 0.75},
    ),
    "granite": lambda: GraniteConfig(**_shape(), **_GRANITE),
    "granite-tied-biases": lambda: GraniteConfig(
        **_shape(tie_word_embeddings=True, attention_bias=True, mlp_bias=True), **_GRANITE
    ),
    "seed_oss": lambda: SeedOssConfig(**_shape(head_dim=16)),
    "seed_oss-biases": lambda: SeedOssConfig(
        **_shape(head_dim=16, attention_bias=False, attention_out_bias=True, mlp_bias=True)
    ),
    "internlm3": lambda: transformers.InternLM3Config(**_shape(head_dim=16)),
    "internlm3-biases": lambda: transformers.InternLM3Config(**_shape(head_dim=16, qkv_bias=True, bias=True)),
    "iquestcoder": lambda: transformers.IQuestCoderConfig(**_shape(head_dim=16)),
    "ernie4_5": lambda: Ernie4_5Config(**_shape(head_dim=16)),
    "ernie4_5-biases": lambda: Ernie4_5Config(
        **_shape(head_dim=16, use_bias=True, tie_word_embeddings=False)
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=_shape(model_type="mistral", head_dim=16, sliding_window=None), vision_config=_VISION
    ),
    "mistral3-untied": lambda: Mistral3Config(
        text_config=_shape(model_type="mistral", head_dim=16, sliding_window=None),
        vision_config=_VISION,
        tie_word_embeddings=False,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config=_shape(rope_parameters=_mrope(1, 1, 2)), vision_config=_VISION | {"depth": 1}
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config=_shape(head_dim=16, rope_parameters=_mrope(2, 3, 3)),
        vision_config=_VISION | {"depth": 1, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=True,
    ),
    "ministral3": lambda: Ministral3Config(**_shape(head_dim=16), rope_parameters=_GROWING),
    "mistral3-ministral3": lambda: Mistral3Config(
        text_config=_shape(model_type="ministral3", head_dim=16, rope_parameters=_GROWING),
        vision_config=_VISION,
    ),
    "smollm3": lambda: SmolLM3Config(**_shape(num_hidden_layers=3, no_rope_layer_interval=2)),
    "smollm3-untied": lambda: SmolLM3Config(
        **_shape(no_rope_layers=[0, 1], attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    ),
    "olmo": lambda: OlmoConfig(**_shape()),
    "olmo2": lambda: Olmo2Config(**_shape()),
    "olmo2-group4": lambda: Olmo2Config(**_shape(num_attention_heads=4, num_key_value_heads=1)),
    "hunyuan_v1_dense": lambda: HunYuanDenseV1Config(**_shape(head_dim=16)),
    "hunyuan_v1_dense-alpha": lambda: HunYuanDenseV1Config(
        **_shape(head_dim=16, tie_word_embeddings=True),
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    ),
    "exaone4": lambda: Exaone4Config(
        **_shape(head_dim=16, sliding_window=None, layer_types=["full_attention"] * 2)
    ),
    "gemma": lambda: GemmaConfig(**_shape(head_dim=16, num_key_value_heads=1)),
    "cohere": lambda: CohereConfig(**_shape(logit_scale=2.0)),
    "stablelm": lambda: StableLmConfig(**_shape(num_attention_heads=3, num_key_value_heads=1)),
    "stablelm-parallel": lambda: StableLmConfig(
        **_shape(num_attention_heads=3, num_key_value_heads=3, use_qkv_bias=True, use_parallel_residual=True)
    ),
    "starcoder2": lambda: Starcoder2Config(**_shape()),
    "starcoder2-no-bias": lambda: Starcoder2Config(**_shape(use_bias=False, tie_word_embeddings=False)),
    "nemotron": lambda: NemotronConfig(**_shape()),
    "arcee": lambda: ArceeConfig(**_shape()),
    "arcee-biases": lambda: ArceeConfig(**_shape(attention_bias=True, mlp_bias=True)),
    "jais2": lambda: Jais2Config(**_shape()),
    "helium": lambda: HeliumConfig(**_shape(head_dim=8, attention_bias=True, mlp_bias=True)),
}
# Of families that came after version 5.17, the oldest that tests run with.
_SINCE = {
    "internlm3": "InternLM3Config",
    "internlm3-biases": "InternLM3Config",
    "iquestcoder": "IQuestCoderConfig",
}
for _name, _config in _SINCE.items():
    if not hasattr(transformers, _config):
        del CONFIGS[_name]

# One model for each block that few families have.
BLOCKS = ("granite", "ministral3", "smollm3", "hunyuan_v1_dense", "olmo2", "gemma", "cohere", "starcoder2")


def make_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model whose every weight matters: no zero bias, no norm of ones, logits of order one."""
    is_text = not hasattr(config, "vision_config")
    model = (AutoModelForCausalLM if is_text else AutoModelForImageTextToText).from_config(config)
    model = model.eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(1.0 + 0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return model


def save_model(config: PreTrainedConfig, directory: Path) -> PreTrainedModel:
    model = make_model(config)
    model.save_pretrained(directory)
    return model


def random_token_ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def rival_logits(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    return model(token_ids[None], use_cache=False).logits[0]
