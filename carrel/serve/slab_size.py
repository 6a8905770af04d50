"""The default size of a slab, by the model that is served: the store is started without knowing one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from carrel.process.gguf_file import read_gguf
from kv_store.config import StoreOptions, slab_bytes_for

# field of config.json -> key of a GGUF file, after the architecture's name
_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}


def default_slab_bytes(model: str, revision: str | None = None) -> int:
    """The store's default for a model of these sizes. model: as `find_model` returns it.

    A model whose sizes cannot be read here has the default of any model: the worker checks all fields later.
    """
    try:
        fields = _fields(model, revision)
        num_heads = _size(fields, "num_attention_heads")
        return slab_bytes_for(
            _size(fields, "num_key_value_heads") if fields.get("num_key_value_heads") else num_heads,
            _size(fields, "head_dim")
            if fields.get("head_dim")
            else _size(fields, "hidden_size") // num_heads,
        )
    except (OSError, ValueError, RecursionError):
        return StoreOptions.slab_bytes


def _size(fields: Mapping[str, object], name: str) -> int:
    """Raises ValueError for what is no positive number."""
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}")
    return value


def _fields(model: str, revision: str | None) -> Mapping[str, object]:
    """Raises OSError and ValueError."""
    path = Path(model)
    if path.is_file():
        head = read_gguf(path)
        return {name: head.metadata.get(f"{head.architecture}.{key}") for name, key in _GGUF_KEYS.items()}
    config = path / "config.json" if path.is_dir() else _hub_config(model, revision)
    fields = json.loads(config.read_text(encoding="utf-8"))
    # a model that also reads images has the decoder's sizes in an object of their own
    if isinstance(fields, dict):
        fields = fields.get("text_config") or fields
    if not isinstance(fields, dict):
        raise ValueError(f"{config} is no object")
    return fields


def _hub_config(model: str, revision: str | None) -> Path:
    """The cached file, or the one that is fetched: the worker needs it too. Raises OSError."""
    # imported late: help does not need it
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json", revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except Exception as exc:
        # the errors of the library's HTTP client have no base of its own
        raise OSError(f"config.json of {model} is out of reach") from exc
