"""Blocks that a model family is composed of: a spec says what a layer is made of, a block holds its weights."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionSpec
from gpu_worker.layers.block import Block, Part, Rank, Target, checkpoint_parts
from gpu_worker.layers.layer import Layer, LayerSpec
from gpu_worker.layers.linear import Linear, LinearSpec, Piece, Source, Split, WeightFormat
from gpu_worker.layers.mlp import MlpSpec
from gpu_worker.layers.rope import RopeSpec

__all__ = [
    "AttentionSpec",
    "Block",
    "Layer",
    "LayerSpec",
    "Linear",
    "LinearSpec",
    "MlpSpec",
    "Part",
    "Piece",
    "Rank",
    "RopeSpec",
    "Source",
    "Split",
    "Target",
    "WeightFormat",
    "checkpoint_parts",
]
