"""The tensors of a GGUF file: under a checkpoint's names, checked against the model, dequantised one at a time."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from carrel.process.gguf_file import GGUFHead, TensorPlace
from gpu_worker.errors import ModelError
from gpu_worker.layers import Part
from gpu_worker.models.checkpoint import check_names
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gguf_config import EMBEDDING, FREQUENCIES, HEAD

# these architectures' files have the rows of queries and keys in the order of interleaved RoPE
_INTERLEAVED = ("llama", "mistral")

_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint:
    """A checkpoint in one GGUF file: the tensors of `Checkpoint` by the same names. All failures are ModelError."""

    def __init__(self, head: GGUFHead, config: ModelConfig) -> None:
        self._head = head
        self._library = _library()
        self._places: dict[str, TensorPlace] = {}
        for place in (place for name, place in head.tensors.items() if name != FREQUENCIES):
            if other := self._places.get(name := checkpoint_name(place.name)):
                raise ModelError(
                    f"{head.path}: {other.name} and {place.name} are both {name}; take another file"
                )
            self._places[name] = place
        heads = {"q": config.num_heads, "k": config.num_kv_heads}
        self._interleaved_heads = {
            f"model.layers.{layer}.self_attn.{which}_proj.{kind}": num_heads
            for layer in range(config.num_layers)
            for which, num_heads in heads.items()
            for kind in ("weight", "bias")
            if head.architecture in _INTERLEAVED
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
            self._check_data(place)

    def tensors(self, names: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These tensors, float32 on the CPU; each is freed when the caller drops it."""
        for name, place in self._places.items():
            if name in names:
                tensor = self._read(place)
                num_heads = self._interleaved_heads.get(name)
                yield name, tensor if num_heads is None else half_by_half(tensor, num_heads)

    def frequency_factors(self) -> tuple[float, ...]:
        """Return the divisors of RoPE's frequencies, one for each; () where the file has none."""
        place = self._head.tensors.get(FREQUENCIES)
        if place is None:
            return ()
        self._check_data(place)
        factors = tuple(self._read(place).flatten().tolist())
        # the negated form also refuses NaN
        if not all(0 < factor < float("inf") for factor in factors):
            raise ModelError(f"{self._head.path}: {place.name} holds numbers that are not positive")
        return factors

    def _check_data(self, place: TensorPlace) -> None:
        where = f"{self._head.path}: {place.name}"
        block_size, block_bytes = self._block(place)
        if place.shape[-1] % block_size:
            raise ModelError(f"{where} has rows of {place.shape[-1]}, which are no blocks of {block_size}")
        if place.offset + prod(place.shape) // block_size * block_bytes > self._head.size:
            raise ModelError(f"{where} lies beyond the file's end: it is truncated, download it again")

    def _block(self, place: TensorPlace) -> tuple[int, int]:
        """Numbers in a block of a tensor's type, and its bytes. Raises ModelError for a type that cannot be read."""
        library = self._library
        try:
            kind = library.GGMLQuantizationType(place.type_id)
            block_size, block_bytes = library.GGML_QUANT_SIZES[kind]
            library.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ModelError(
                f"{self._head.path}: {place.name} is of ggml type {place.type_id}, which cannot be dequantised "
                f"({error}); take a file of another type, such as Q4_K_M or Q8_0"
            ) from error
        return block_size, block_bytes

    def _read(self, place: TensorPlace) -> torch.Tensor:
        block_size, block_bytes = self._block(place)
        *rows, length = place.shape
        shape = (*rows, length // block_size * block_bytes)
        try:
            data = np.memmap(self._head.path, np.uint8, "r", place.offset, shape)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self._head.path}: {place.name} cannot be read ({error})") from error
        values = self._library.dequantize(data, self._library.GGMLQuantizationType(place.type_id))
        # float32 data is the file's own memory, which must not be written to
        return torch.from_numpy(values if values.flags.writeable else np.array(values))


def checkpoint_name(name: str) -> str:
    """The checkpoint's name of a GGUF tensor; its own where it is none of ours."""
    block, _, rest = name.removeprefix("blk.").partition(".")
    stem, _, kind = rest.rpartition(".")
    if name.startswith("blk.") and stem in _LAYER_NAMES:
        return f"model.layers.{block}.{_LAYER_NAMES[stem]}.{kind}"
    return _NAMES.get(name, name)


def half_by_half(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [num_heads * d, ...] of heads whose pairs are neighbours, such that element i pairs with i + d / 2."""
    pairs = rows.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def _library() -> Any:
    # no other model needs it
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ModelError(
            "GGUF files need the package gguf: pip install 'carrel[gpu-worker]', or `make setup` in a checkout"
        ) from error
