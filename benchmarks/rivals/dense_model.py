"""The least that a dense decoder can be: plain torch operations over random weights, no cache management at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.shapes import ModelShape

# (layer, queries [T, H_q, d], keys, values [T, H_kv, d]) -> [T, H_q, d]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
WEIGHT_STD = 0.02


@dataclass(frozen=True)
class DenseLayer:
    """Query, key and value in one matrix, gate and up in another."""

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class DenseModel:
    """Weights of a shape, normal at random. All calls may be captured in a CUDA graph."""

    def __init__(self, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        torch.manual_seed(0)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, device=device, dtype=dtype).normal_(std=WEIGHT_STD)

        def norm() -> Tensor:
            return torch.ones(shape.hidden_size, device=device, dtype=dtype)

        width, heads = shape.hidden_size, shape.num_heads * shape.head_dim
        qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.embed = matrix(shape.vocab_size, width)
        self.head = self.embed if shape.tie_word_embeddings else matrix(shape.vocab_size, width)
        self.final_norm = norm()
        self.layers = [
            DenseLayer(
                norm(),
                matrix(qkv, width),
                matrix(width, heads),
                norm(),
                matrix(2 * shape.intermediate_size, width),
                matrix(width, shape.intermediate_size),
            )
            for _ in range(shape.num_layers)
        ]

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, 1, d] of positions [T]. The long-context scaling would change no time."""
        half = torch.arange(0, self.shape.head_dim, 2, device=self.device) / self.shape.head_dim
        angles = torch.outer(positions.float(), self.shape.rope_theta**-half)
        cos, sin = angles.cos(), angles.sin()
        pair = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return pair[0].to(self.dtype)[:, None], pair[1].to(self.dtype)[:, None]

    def next_tokens(
        self, token_ids: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, num_last: int
    ) -> Tensor:
        """The likeliest token behind each of the last `num_last` of token_ids [T]."""
        shape = self.shape
        cos, sin = rotation
        hidden = F.embedding(token_ids, self.embed)
        for index, layer in enumerate(self.layers):
            qkv = F.linear(self._norm(hidden, layer.input_norm), layer.qkv)
            heads = qkv.view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
            num_turned = shape.num_heads + shape.num_kv_heads
            turned, values = heads[:, :num_turned], heads[:, num_turned:]
            turned = torch.addcmul(turned * cos, turned.roll(shape.head_dim // 2, -1), sin)
            queries, keys = turned[:, : shape.num_heads], turned[:, shape.num_heads :]
            attention = attend(index, queries, keys, values)
            hidden = hidden + F.linear(attention.flatten(1), layer.output)
            gate, up = F.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(self._norm(hidden[-num_last:], self.final_norm), self.head).argmax(-1)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.shape.rms_norm_eps)
