"""Layers of one sequence as one layer of more heads: a policy that `treats_layers_alike` compresses them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gpu_worker.policies.retain.base import LayerRows, Retained


def stacked(layers: Sequence[LayerRows]) -> LayerRows:
    """Of as many rows and rounds each. The heads of the first layer come first."""
    return replace(
        layers[0],
        keys=torch.cat([rows.keys for rows in layers]),
        values=torch.cat([rows.values for rows in layers]),
        positions=torch.cat([rows.positions for rows in layers]),
        queries=torch.cat([rows.queries for rows in layers]),
        degrees=_over([rows.degrees for rows in layers]),
        scores=_over([rows.scores for rows in layers]),
        history=_over([rows.history for rows in layers]),
    )


def split(retained: Retained, num_layers: int) -> list[Retained]:
    """What was kept of `stacked` layers, layer by layer."""
    positions, keys, values = (
        of.chunk(num_layers) for of in (retained.positions, retained.keys, retained.values)
    )
    degrees, scores, history = (
        _parts(of, num_layers) for of in (retained.degrees, retained.scores, retained.history)
    )
    return [
        Retained(positions[n], keys[n], values[n], degrees[n], scores[n], history[n], rounds=retained.rounds)
        for n in range(num_layers)
    ]


def _over(tensors: Sequence[Tensor | None]) -> Tensor | None:
    known = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(known) if len(known) == len(tensors) else None


def _parts(tensor: Tensor | None, num_layers: int) -> Sequence[Tensor | None]:
    return [None] * num_layers if tensor is None else tensor.chunk(num_layers)
