"""The MLP of a layer: one product, an activation, another product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from gpu_worker.kernels.silu_mul import silu_mul
from gpu_worker.layers.block import Module, Target
from gpu_worker.layers.linear import Linear, LinearSpec


def gelu_tanh(rows: Tensor) -> Tensor:
    """Return GELU by its approximation with a tanh."""
    return F.gelu(rows, approximate="tanh")


def gelu_tanh_mul(rows: Tensor) -> Tensor:
    """Return `gelu_tanh` of the first half of each row times the second half."""
    gate, up = rows.tensor_split(2, dim=-1)
    return gelu_tanh(gate).mul_(up)


def relu2(rows: Tensor) -> Tensor:
    """Return the square of ReLU."""
    return F.relu(rows).square_()


# By name: a spec names what computes rows. silu_mul: a gate's SiLU times the outputs behind it.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_mul": silu_mul,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_tanh_mul": gelu_tanh_mul,
    "relu2": relu2,
}


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """up: gate and up one behind the other for a gated activation. activation: a name of ACTIVATIONS."""

    up: LinearSpec
    down: LinearSpec
    activation: str = "silu_mul"

    @property
    def num_weights(self) -> int:
        """Weights that a token is multiplied by."""
        return self.up.num_inputs * self.up.num_outputs + self.down.num_inputs * self.down.num_outputs

    @property
    def width(self) -> int:
        """Elements of a token's widest activation."""
        return self.up.num_outputs

    def build(self, prefix: str, target: Target) -> Mlp:
        return Mlp(self, prefix, target)


class Mlp(Module):
    """A layer's MLP; prefix: the layer's."""

    def __init__(self, spec: MlpSpec, prefix: str, target: Target) -> None:
        super().__init__()
        self._activate = ACTIVATIONS[spec.activation]
        self.up = Linear(spec.up, prefix, target)
        self.down = Linear(spec.down, prefix, target)

    def output(self, inputs: Tensor) -> Tensor:
        """Inputs [T, hidden_size] to outputs of the same shape."""
        return self.down.matmul(self._activate(self.up.matmul(inputs)))

    def output_onto(self, total: Tensor, inputs: Tensor) -> Tensor:
        """Return `total` plus the outputs; `total` may be overwritten."""
        return self.down.matmul_onto(total, self._activate(self.up.matmul(inputs)))
