"""A model whose query heads each have KV of their own, as several papers' code selects."""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import Decoder
from gpu_worker.models.loader import LoadedModel


def ungrouped(model: LoadedModel) -> LoadedModel:
    """The same function with as many KV heads as query heads: each group's KV head repeated for its query heads.

    Every policy then selects for each query head, at a KV cache that is `group_size` times as large. The decoder's
    weights are taken over, but for the projections of queries, keys and values: of these both are held meanwhile.
    """
    config = model.config
    if config.group_size == 1:
        return model
    wide = replace(config, num_kv_heads=config.num_heads)
    decoder = Decoder(wide, torch.device("meta"), model.decoder.dtype)
    # A tied head is named twice, and stays tied.
    tensors = dict(model.decoder.named_parameters(remove_duplicate=False))
    for name, tensor in tensors.items():
        if name.endswith(("qkv_weight", "qkv_bias")):
            tensors[name] = torch.nn.Parameter(_repeated(tensor, config), requires_grad=False)
    decoder.load_state_dict(tensors, assign=True)
    decoder.register_buffer("_rope_table", model.decoder.get_buffer("_rope_table"), persistent=False)
    num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
    return replace(model, config=wide, decoder=decoder, num_parameters=num_parameters)


def _repeated(fused: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rows of query, key and value heads, the key's and value's once for each query head of their group."""
    dim, group = config.head_dim, config.group_size
    query, key, value = fused.split(
        [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
    )
    wide = [
        part.unflatten(0, (-1, dim)).repeat_interleave(group, dim=0).flatten(0, 1) for part in (key, value)
    ]
    return torch.cat([query, *wide])
