"""Matrices of 4-bit places in a codebook, as bitsandbytes stores them; every device holds their values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.layers import PLAIN, Matrix, Part, StoredMatrix, Target, WeightFormat
from gpu_worker.layers.block import FLOATS

BYTES = ("U8",)


@dataclass(frozen=True)
class Codebook(WeightFormat):
    """value = codebook[place] * scale of its block, counted along the rows.

    state: the last word of the tensor that describes the blocks.
    state_size, num_blocks: of that tensor, and of the scales.
    nested: blocks of scales that share a scale of the scales, and places in their codebook; None for plain scales.
    """

    state: str
    state_size: int
    num_blocks: int
    nested: tuple[int, int] | None
    quantization = "bitsandbytes"

    def parts(self, name: str, shape: tuple[int, int]) -> dict[str, Part]:
        weight = f"{name}.weight"
        parts = {
            weight: Part("places", (shape[0] * shape[1] // 2, 1), BYTES),
            f"{weight}.absmax": Part("scales", (self.num_blocks,), FLOATS if self.nested is None else BYTES),
            f"{weight}.quant_map": Part("codebook", (16,)),
            f"{weight}.quant_state.{self.state}": Part("state", (self.state_size,), BYTES),
        }
        if self.nested is not None:
            parts[f"{weight}.nested_absmax"] = Part("nested_scales", (self.nested[0],))
            parts[f"{weight}.nested_quant_map"] = Part("nested_codebook", (self.nested[1],))
        return parts

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], device: torch.device
    ) -> StoredMatrix:
        try:
            state = json.loads(bytes(tensors["state"].tolist()))
            block, stored = int(state["blocksize"]), tuple(state["shape"])
            nested = (
                (int(state["nested_blocksize"]), float(state["nested_offset"])) if self.nested else (1, 0.0)
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise ModelError(
                f"its {self.state} cannot be read ({exc!r}); download the weights again"
            ) from exc
        if stored != shape or self.num_blocks != -(-shape[0] * shape[1] // block):
            raise ModelError(f"it has shape {list(stored)} in blocks of {block}; expected {list(shape)}")
        on_device = {role: tensor.to(device) for role, tensor in tensors.items()}
        scales = on_device["scales"]
        if self.nested is not None:
            of_scales = on_device["nested_scales"].float().repeat_interleave(nested[0])[: len(scales)]
            scales = on_device["nested_codebook"].float()[scales.long()] * of_scales + nested[1]
        places = on_device["places"].flatten()
        numbers = on_device["codebook"].float()[
            torch.stack([places >> 4, places & 15], dim=1).flatten().long()
        ]
        values = numbers * scales.float().repeat_interleave(block)[: len(numbers)]
        return StoredMatrix(values.view(shape))

    def matrix(self, num_rows: int, num_columns: int, target: Target) -> Matrix:
        return PLAIN.matrix(num_rows, num_columns, target)
