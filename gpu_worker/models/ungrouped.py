"""A model whose query heads each have KV of their own, as several papers' code selects."""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_worker.errors import ModelError
from gpu_worker.layers import AttentionSpec, Source
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import Decoder
from gpu_worker.models.loader import LoadedModel


def ungrouped(model: LoadedModel) -> LoadedModel:
    """The same function with as many KV heads as query heads: each group's KV head repeated for its query heads.

    Every policy then selects for each query head, at a KV cache that is `group_size` times as large. The decoder's
    weights are taken over, but for the projections of queries, keys and values: of these both are held meanwhile.
    Raises ModelError where these are quantised.
    """
    config = model.config
    if config.group_size == 1:
        return model
    if model.decoder.packed_kinds:
        raise ModelError("query heads cannot select each for itself with quantised weights: use plain ones")
    layers = (replace(layer, attention=_widened(layer.attention)) for layer in config.layers)
    wide = replace(config, layers=tuple(layers))
    decoder = Decoder(wide, torch.device("meta"), model.decoder.dtype)
    # A tied head is named twice, and stays tied.
    tensors = dict(model.decoder.named_parameters(remove_duplicate=False))
    for name, tensor in tensors.items():
        if ".qkv." in name:
            tensors[name] = torch.nn.Parameter(_repeated(tensor, config), requires_grad=False)
        elif decoder.get_parameter(name).shape != tensor.shape:
            # a norm over all key heads, whose mean square stays
            repeated = _repeated_heads(tensor, config)
            tensors[name] = torch.nn.Parameter(repeated, requires_grad=False)
    decoder.load_state_dict(tensors, assign=True)
    for name, table in model.decoder.named_buffers():
        owner, _, last = name.rpartition(".")
        decoder.get_submodule(owner).register_buffer(last, table, persistent=False)
    return replace(model, config=wide, decoder=decoder, num_parameters=decoder.num_parameters)


def _widened(spec: AttentionSpec) -> AttentionSpec:
    """The attention with a key and value head for each query head; no checkpoint has its projection."""
    projected = Source("self_attn.qkv_proj", (spec.num_heads * spec.head_dim,) * 3)
    return replace(spec, num_kv_heads=spec.num_heads, qkv=replace(spec.qkv, sources=(projected,)))


def _repeated(fused: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rows of query, key and value heads, the key's and value's once for each query head of their group."""
    dim = config.head_dim
    query, key, value = fused.split(
        [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
    )
    return torch.cat([query, *(_repeated_heads(part, config) for part in (key, value))])


def _repeated_heads(rows: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    heads = rows.unflatten(0, (-1, config.head_dim))
    return heads.repeat_interleave(config.group_size, dim=0).flatten(0, 1)
