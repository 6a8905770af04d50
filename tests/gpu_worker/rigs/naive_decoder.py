"""Greedy decoding without an engine: all rows in one tensor a layer, one KV head at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_worker.kernels.prefill_attention import attend_chunk_naive
from gpu_worker.models import LoadedModel

# (layer, KV head, queries [G, d], keys [T, d] with the new token's last) to the positions attended.
Attended = Callable[[int, int, Tensor, Tensor], list[int]]


def attend_everything(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
    return list(range(len(keys)))


@torch.inference_mode()
def greedy(
    model: LoadedModel,
    prompt: tuple[int, ...],
    max_tokens: int,
    attended: Attended = attend_everything,
) -> tuple[list[int], list[Tensor]]:
    """The next `max_tokens` tokens after a dense prefill, and every layer's rows [H_kv, T, 2d]."""
    decoder, config = model.decoder, model.config
    scale, dim = decoder.attention_scale, config.head_dim
    hidden, rows = decoder.embed(torch.tensor(prompt)), []
    for layer in range(config.num_layers):
        query, key, value = decoder.project_qkv(layer, hidden, torch.arange(len(prompt)))
        rows.append(torch.cat([key, value], dim=-1).transpose(0, 1))
        hidden = decoder.finish_layer(layer, hidden, attend_chunk_naive(query, rows[layer], 0, scale))
    tokens = [int(decoder.logits(hidden[-1:]).argmax())]
    while len(tokens) < max_tokens:
        hidden = decoder.embed(torch.tensor([tokens[-1]]))
        position = torch.tensor([rows[0].shape[1]])
        for layer in range(config.num_layers):
            query, key, value = decoder.project_qkv(layer, hidden, position)
            rows[layer] = torch.cat([rows[layer], torch.cat([key, value], -1).transpose(0, 1)], dim=1)
            heads = []
            for kv_head, queries in enumerate(query[0].view(config.num_kv_heads, -1, dim)):
                past = rows[layer][kv_head]
                taken = past[attended(layer, kv_head, queries, past[:, :dim])]
                heads.append((queries @ taken[:, :dim].T * scale).softmax(-1) @ taken[:, dim:])
            hidden = decoder.finish_layer(layer, hidden, torch.cat(heads)[None])
        tokens.append(int(decoder.logits(hidden).argmax()))
    return tokens, rows


def first_best(scores: Tensor, count: int, begin: int) -> list[int]:
    """Positions of the best scores, where scores[0] is that of position `begin`; of equals the last."""
    values = scores.tolist()
    places = sorted(range(len(values)), key=lambda place: (-values[place], -place))
    return [begin + place for place in places[:count]]
