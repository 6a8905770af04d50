"""The interface between a model's weights and the checkpoint that fills them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gpu_worker.errors import ModelError

if TYPE_CHECKING:
    from gpu_worker.layers.weights import WeightFormat

# Element types of plain weights, by the names of safetensors.
FLOATS = ("F64", "F32", "F16", "BF16")
_RANDOM_STD = 0.02


class Part(NamedTuple):
    """A tensor of a checkpoint that a block reads.

    role: what the tensor is to its block.
    shape: the whole tensor's, not that of one rank's shard.
    dtypes: element types that the block can load.
    """

    role: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `count` processes that divide a model's matrices among them."""

    index: int = 0
    count: int = 1

    def of(self, size: int, unit: str) -> slice:
        """Return this rank's share of `size` units. Raises ModelError if they cannot be divided evenly."""
        if size % self.count:
            raise ModelError(f"{size} {unit} cannot be divided among {self.count} ranks")
        share = size // self.count
        return slice(self.index * share, (self.index + 1) * share)


ALONE = Rank()


class Target(NamedTuple):
    """Where weights are allocated, in which type, and whose shard of them.

    formats: how the checkpoint stores matrices, by their modules; of all others their specs say it.
    """

    device: torch.device
    dtype: torch.dtype
    rank: Rank = ALONE
    formats: Mapping[str, WeightFormat] = MappingProxyType({})

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """Allocate an uninitialised weight without gradient."""
        tensor = torch.empty(shape, device=self.device, dtype=self.dtype)
        return torch.nn.Parameter(tensor, requires_grad=False)


class Module(torch.nn.Module):
    """A module whose modules are plain attributes too: PyTorch's own lookup takes some 10 µs of each layer."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, torch.nn.Module):
            self.__dict__[name] = value


class Block(Module, ABC):
    """A part of a model that holds weights: it names the checkpoint's tensors, and loads each."""

    @abstractmethod
    def parts(self) -> dict[str, Part]:
        """Return every tensor that the checkpoint must have, by its name there."""

    @abstractmethod
    def load(self, name: str, tensor: Tensor) -> None:
        """Copy this rank's shard of a tensor that `parts` names."""

    def floats(self) -> tuple[Tensor, ...]:
        """Return the tensors of loaded weights that can have NaN or infinite numbers."""
        return tuple(self.parameters())

    @abstractmethod
    def fill(self, generator: torch.Generator) -> None:
        """Make random weights."""


class Whole(Block):
    """One tensor that every rank holds whole.

    name: the tensor's in the checkpoint.
    """

    def __init__(self, name: str, shape: tuple[int, ...], target: Target) -> None:
        super().__init__()
        self._name = name
        self.weight = target.empty(*shape)

    def parts(self) -> dict[str, Part]:
        return {self._name: Part("weight", tuple(self.weight.shape))}

    def load(self, name: str, tensor: Tensor) -> None:
        self.weight.copy_(tensor)

    def fill(self, generator: torch.Generator) -> None:
        fill_random(self.weight, generator)


def fill_random(weight: Tensor, generator: torch.Generator) -> None:
    weight.normal_(0.0, _RANDOM_STD, generator=generator)


def checkpoint_parts(model: torch.nn.Module) -> dict[str, tuple[Block, Part]]:
    """Return every tensor that a model's checkpoint must have, by name, with the block that loads it."""
    found: dict[str, tuple[Block, Part]] = {}
    for block in (module for module in model.modules() if isinstance(module, Block)):
        for name, part in block.parts().items():
            assert name not in found, f"two blocks of this model load {name}"
            found[name] = block, part
    return found
