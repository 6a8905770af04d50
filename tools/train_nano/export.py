"""Writes a trained model as a Hugging Face directory, and reads one back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from carrel.evaluation.documents import BOS, END, PAD
from tools.train_nano.config import ModelConfig
from tools.train_nano.model import Llama

MAX_WEIGHT_BYTES = 32_000_000


class ExportError(Exception):
    """The model cannot be written as asked."""


def save_model(model: Llama, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes model.safetensors in `dtype`, config.json and generation_config.json.

    Raises ExportError when the weights exceed `MAX_WEIGHT_BYTES`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": tensor.to(dtype).contiguous().cpu() for name, tensor in model.state_dict().items()
    }
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if dtype is torch.bfloat16 and num_bytes > MAX_WEIGHT_BYTES:
        raise ExportError(
            f"weights take {num_bytes:,} bytes, over {MAX_WEIGHT_BYTES:,}: make the model smaller"
        )
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", hf_config(model.config, dtype))
    generation = {"bos_token_id": BOS, "eos_token_id": [END], "pad_token_id": PAD, "do_sample": False}
    _write_json(directory / "generation_config.json", generation)


def load_model(directory: Path) -> Llama:
    """Reads a directory written by `save_model`; weights in their stored dtype."""
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig(**{name: raw[name] for name in ModelConfig.__dataclass_fields__})
    tensors = load_file(directory / "model.safetensors")
    model = Llama(config)
    model.load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, assign=True
    )
    return model


def hf_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: getattr(config, name) for name in ModelConfig.__dataclass_fields__},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "rope_scaling": None,
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
