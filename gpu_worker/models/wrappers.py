"""The text part of models that also read images, which has a configuration and tensors within theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.llama import read_ministral3, read_mistral
from gpu_worker.models.qwen import read_qwen2, read_qwen3

# text models that a Mistral 3 wraps
_MISTRALS = {"mistral": read_mistral, "ministral3": read_ministral3}
_VISION = ("vision_tower.", "multi_modal_projector.", "visual.")
# where text lies: in files of transformers 5, in older ones, in those without a prefix of its own
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# with text alone, all axes of these positions are the same
_POSITIONS = ("mrope_section", "mrope_interleaved")


def read_mistral3(fields: ConfigFields) -> ModelConfig:
    """Mistral Small 3.1 and 3.2: text of the types in `_MISTRALS`."""
    text = _text_fields(fields, tied=True)
    return _wrapped(fields, _MISTRALS[text.choice("model_type", _MISTRALS, "mistral")], text)


def read_qwen2_5_vl(fields: ConfigFields) -> ModelConfig:
    """Qwen 2.5-VL, whose older files have the fields of its text at the top."""
    return _wrapped(fields, read_qwen2, _text_fields(fields))


def read_qwen3_vl(fields: ConfigFields) -> ModelConfig:
    """Qwen 3-VL, dense."""
    return _wrapped(fields, read_qwen3, _text_fields(fields))


def _wrapped(
    fields: ConfigFields, read: Callable[[ConfigFields], ModelConfig], text: ConfigFields
) -> ModelConfig:
    config = read(text)
    return replace(
        config,
        model_type=fields.text("model_type"),
        text_prefixes=_PREFIXES,
        heads=_HEADS,
        skipped=(*_VISION, *(f"model.{name}" for name in _VISION)),
    )


def _text_fields(fields: ConfigFields, tied: bool = False) -> ConfigFields:
    """Return the text's fields, with what the whole model says for it. tied: where neither says it."""
    text = fields.object("text_config") if fields.has("text_config") else fields
    name = "rope_scaling" if text.has("rope_scaling") else "rope_parameters"
    rope = {key: value for key, value in text.object(name).items() if key not in _POSITIONS}
    for key in ("type", "rope_type"):
        if rope.get(key) == "mrope":
            rope[key] = "default"
    changes: dict[str, object] = {name: rope}
    for key in ("dtype", "torch_dtype", "eos_token_id"):
        if fields.has(key) and not text.has(key):
            changes[key] = dict(fields.items())[key]
    is_tied = fields.flag("tie_word_embeddings", text.flag("tie_word_embeddings", tied))
    return text.changed({**changes, "tie_word_embeddings": is_tied})
