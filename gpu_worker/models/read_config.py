"""The configuration of a model, from its directory or GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from carrel.process.gguf_file import GGUFError, GGUFHead, read_gguf
from carrel.process.model_types import ModelTypeError, check_model_type
from gpu_worker.errors import ModelError
from gpu_worker.layers import AttentionSpec
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.families import FAMILIES
from gpu_worker.models.gguf_config import FREQUENCIES, LONG_FACTORS, gguf_fields
from gpu_worker.models.gguf_data import GGUFData
from gpu_worker.models.overrides import overridden


def read_config(source: Path, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """Read config.json and, where it exists, generation_config.json; end-of-sequence ids are those of both. Of a GGUF
    file its metadata.

    source: a directory, a JSON file in place of its config.json, or a GGUF file.
    overrides: fields of config.json with other values. Raises ModelError.
    """
    if source.suffix == ".json" and source.is_file():
        return _read_family(overridden(ConfigFields.read(source), overrides or {}))
    if source.is_file():
        return _gguf_config(gguf_head(source), overrides or {})
    fields = overridden(ConfigFields.read(source / "config.json"), overrides or {})
    config = _read_family(fields)
    path = source / "generation_config.json"
    if not path.exists():
        return config
    generation = ConfigFields.read(path)
    eos_token_ids = generation.token_ids("eos_token_id", config.vocab_size) + config.eos_token_ids
    return replace(config, eos_token_ids=tuple(dict.fromkeys(eos_token_ids)))


def _read_family(fields: ConfigFields) -> ModelConfig:
    fields.texts("architectures")
    try:
        check_model_type(fields.where, dict(fields.items()), FAMILIES)
    except ModelTypeError as error:
        raise ModelError(str(error)) from error
    return FAMILIES[fields.text("model_type")](fields)


def gguf_head(path: Path) -> GGUFHead:
    try:
        return read_gguf(path)
    except GGUFError as exc:
        raise ModelError(str(exc)) from exc


def _gguf_config(head: GGUFHead, overrides: Mapping[str, object]) -> ModelConfig:
    data = GGUFData(head)
    long = {field: list(data.factors(name)) for field, name in LONG_FACTORS.items() if name in head.tensors}
    fields = overridden(gguf_fields(head, long), overrides)
    config = FAMILIES[fields.text("model_type")](fields)
    factors = data.factors(FREQUENCIES)
    if not factors:
        return config
    layers = (replace(layer, attention=_slowed(head, layer.attention, factors)) for layer in config.layers)
    return replace(config, layers=tuple(layers))


def _slowed(head: GGUFHead, attention: AttentionSpec, factors: tuple[float, ...]) -> AttentionSpec:
    """Return the attention with these divisors of RoPE's frequencies, if it turns. Raises ModelError."""
    if attention.rope is None:
        return attention
    if len(factors) != attention.rope.rotary_dim // 2:
        raise ModelError(
            f"{head.path}: {FREQUENCIES} holds {len(factors)} numbers; expected {attention.rope.rotary_dim // 2}"
        )
    return replace(attention, rope=replace(attention.rope, frequency_factors=factors))
