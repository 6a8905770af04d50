"""Blocks that a model family is composed of: a spec says what a layer is made of, a block holds its weights."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionSpec
from gpu_worker.layers.block import Block, Part, Rank, Target, checkpoint_parts
from gpu_worker.layers.head_norms import HeadNorms, NormsAfterRope, NormsOverWidth
from gpu_worker.layers.layer import Layer, LayerSpec, ParallelLayerSpec
from gpu_worker.layers.linear import Linear, LinearSpec, Source, Split, linear_modules
from gpu_worker.layers.mlp import MlpSpec
from gpu_worker.layers.norm import (
    LayerNorm,
    Norm,
    PlainLayerNorm,
    RmsNorm,
    ScaledLayerNorm,
    ShiftedLayerNorm,
    ShiftedRmsNorm,
)
from gpu_worker.layers.rope import RopeSpec
from gpu_worker.layers.weights import PLAIN, Holding, Matrix, Numbers, Piece, StoredMatrix, WeightFormat

__all__ = [
    "PLAIN",
    "AttentionSpec",
    "Block",
    "HeadNorms",
    "Holding",
    "Layer",
    "LayerNorm",
    "LayerSpec",
    "Linear",
    "LinearSpec",
    "Matrix",
    "MlpSpec",
    "Norm",
    "NormsAfterRope",
    "NormsOverWidth",
    "Numbers",
    "ParallelLayerSpec",
    "Part",
    "Piece",
    "PlainLayerNorm",
    "Rank",
    "RmsNorm",
    "RopeSpec",
    "ScaledLayerNorm",
    "ShiftedLayerNorm",
    "ShiftedRmsNorm",
    "Source",
    "Split",
    "StoredMatrix",
    "Target",
    "WeightFormat",
    "checkpoint_parts",
    "linear_modules",
]
