"""The data of a GGUF file's tensors, dequantised or as it is stored."""

from __future__ import annotations

import importlib
from math import prod
from typing import Any

import numpy as np
import torch

from carrel.process.gguf_file import GGUFHead, TensorPlace
from gpu_worker.errors import ModelError


class GGUFData:
    """Reads tensors of a file. All failures are ModelError."""

    def __init__(self, head: GGUFHead) -> None:
        self._head = head
        self._library = _library()

    def factors(self, name: str) -> tuple[float, ...]:
        """Return the divisors of RoPE's frequencies in this tensor, one for each; () where the file has none."""
        place = self._head.tensors.get(name)
        if place is None:
            return ()
        self.check(place)
        factors = tuple(self.read(place).flatten().tolist())
        # the negated form also refuses NaN
        if not all(0 < factor < float("inf") for factor in factors):
            raise ModelError(f"{self._head.path}: {place.name} holds numbers that are not positive")
        return factors

    def check(self, place: TensorPlace) -> None:
        """Raise ModelError unless the data is there, of a type that can be dequantised."""
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

    def read(self, place: TensorPlace) -> torch.Tensor:
        """Return a tensor, float32 on the CPU."""
        kind = self._library.GGMLQuantizationType(place.type_id)
        values = self._library.dequantize(self._bytes(place), kind)
        # float32 data is the file's own memory, which must not be written to
        return torch.from_numpy(values if values.flags.writeable else np.array(values))

    def raw(self, place: TensorPlace) -> torch.Tensor:
        """Return a tensor as it is stored: uint8 [..., bytes of a row] on the CPU."""
        return torch.from_numpy(np.array(self._bytes(place)))

    def _bytes(self, place: TensorPlace) -> np.ndarray:
        """The file's own memory, uint8 [..., bytes of a row]."""
        block_size, block_bytes = self._block(place)
        *rows, length = place.shape
        shape = (*rows, length // block_size * block_bytes)
        try:
            return np.memmap(self._head.path, np.uint8, "r", place.offset, shape)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self._head.path}: {place.name} cannot be read ({error})") from error


def _library() -> Any:
    # no other model needs it
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ModelError(
            "GGUF files need the package gguf: pip install 'carrel[gpu-worker]', or `make setup` in a checkout"
        ) from error
