"""The tensors of a GGUF file: under a checkpoint's names, checked against the model, dequantised one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from carrel.process.gguf_file import GGUFHead, TensorPlace
from gpu_worker.errors import ModelError
from gpu_worker.layers import Part, WeightFormat
from gpu_worker.models.checkpoint import check_names
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.formats.find import FoundFormats
from gpu_worker.models.formats.ggml import BLOCK_TYPES, Ggml
from gpu_worker.models.gguf_architectures import ARCHITECTURES, Architecture
from gpu_worker.models.gguf_config import EMBEDDING, FREQUENCIES, HEAD, LONG_FACTORS
from gpu_worker.models.gguf_data import GGUFData

_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}


class GGUFCheckpoint:
    """A checkpoint in one GGUF file: the tensors of `Checkpoint` by the same names. All failures are ModelError."""

    def __init__(self, head: GGUFHead, config: ModelConfig) -> None:
        self._head = head
        self._data = GGUFData(head)
        architecture = ARCHITECTURES[head.architecture]
        self._places: dict[str, TensorPlace] = {}
        of_rope = {FREQUENCIES, *LONG_FACTORS.values()} if architecture.scales_long else {FREQUENCIES}
        for place in (place for name, place in head.tensors.items() if name not in of_rope):
            if other := self._places.get(name := checkpoint_name(place.name, architecture)):
                raise ModelError(
                    f"{head.path}: {other.name} and {place.name} are both {name}; take another file"
                )
            self._places[name] = place
        self._formats: dict[str, WeightFormat] = {
            name.removesuffix(".weight"): Ggml(place.type_id)
            for name, place in self._places.items()
            if place.type_id in BLOCK_TYPES and len(place.shape) == 2 and place.name.startswith("blk.")
        }
        heads = {"q": config.num_heads, "k": config.num_kv_heads}
        self._interleaved_heads = {
            f"model.layers.{layer}.self_attn.{which}_proj.{kind}": num_heads
            for layer in range(config.num_layers)
            for which, num_heads in heads.items()
            for kind in ("weight", "bias")
            if architecture.is_reordered
        }

    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def check(self, parts: Mapping[str, Part], ignorable: frozenset[str]) -> None:
        """ModelError unless the tensors are these, of these shapes, all there, and of types that can be dequantised."""
        check_names(str(self._head.path), "its metadata", self.names(), parts, ignorable)
        for name, part in parts.items():
            place = self._places[name]
            if place.shape != part.shape:
                raise ModelError(
                    f"{self._head.path}: {place.name} has shape {list(place.shape)}; "
                    f"the metadata asks for {list(part.shape)}"
                )
            self._data.check(place)

    def formats(self) -> FoundFormats:
        """Find the matrices of layers that can stay packed; others are dequantised while they are read."""
        return FoundFormats(self._formats)

    def tensors(self, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These tensors on the CPU: float32, or the bytes [N, bytes of a row] of matrices that stay packed.

        Each is freed when the caller drops it.
        """
        for name, place in self._places.items():
            if name in names:
                is_packed = name.removesuffix(".weight") in self._formats
                tensor = self._data.raw(place) if is_packed else self._data.read(place)
                num_heads = self._interleaved_heads.get(name)
                yield name, tensor if num_heads is None else half_by_half(tensor, num_heads)


def checkpoint_name(name: str, architecture: Architecture) -> str:
    """Return the checkpoint's name of a GGUF tensor; its own where it is none of ours."""
    block, _, rest = name.removeprefix("blk.").partition(".")
    stem, _, kind = rest.rpartition(".")
    module = architecture.module(stem)
    if name.startswith("blk.") and module:
        return f"model.layers.{block}.{module}.{kind}"
    return _NAMES.get(name, name)


def half_by_half(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [num_heads * d, ...] of heads whose pairs are neighbours, such that element i pairs with i + d / 2."""
    pairs = rows.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)
