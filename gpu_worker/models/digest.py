"""A digest of loaded weights, by which rows that they computed are known again.

It reads every bit, on the device where the weights are: one pass. Of each block of 32-bit words it takes a sum, modulo
2^64, of the words times fixed random odd numbers. A block in which one word differs always has another sum; one in
which several do has the same by one chance in 2^32 at most (multilinear hashing: Lemire and Kaser, arXiv:1202.4961).
Only the sums reach the host: 8 bytes for each 128 KiB, and for each tensor. It does not defend against weights that
are made to collide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

# On a CPU a block and its products stay in a core's cache. PyTorch gives so few numbers to one thread: several threads
# wait for each other, on a busy machine 10 times longer than they work.
BLOCK_WORDS = 1 << 15
# Blocks in one launch: on a GPU 16 MiB of weights, with 32 MiB of products.
_GROUP = {"cuda": 128}


def weights_digest(module: torch.nn.Module) -> bytes:
    """Return the `digest_of` all parameters and lasting buffers.

    Tables that are computed from the configuration are no part of it: processors round them differently.
    """
    return digest_of(module.state_dict())


def digest_of(tensors: Mapping[str, Tensor]) -> bytes:
    """Return 32 bytes that differ where a name, shape, type or bit of these tensors does."""
    total = hashlib.blake2b(digest_size=32)
    keys: dict[torch.device, Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        if tensor.device not in keys:
            keys[tensor.device] = _keys().to(tensor.device)
        sums = torch.cat([*_sums(tensor, keys[tensor.device])]).cpu().numpy().astype("<i8").tobytes()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {len(sums)}\n".encode() + sums)
    return total.digest()


def _sums(tensor: Tensor, keys: Tensor) -> Iterator[Tensor]:
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    num_whole = raw.numel() // (4 * BLOCK_WORDS)
    whole, rest = raw.tensor_split([num_whole * 4 * BLOCK_WORDS])
    for blocks in whole.view(torch.int32).view(-1, BLOCK_WORDS).split(_GROUP.get(tensor.device.type, 1)):
        yield (blocks * keys).sum(dim=1)
    words = torch.nn.functional.pad(rest, (0, -rest.numel() % 4)).view(torch.int32)
    yield (words * keys[: words.numel()]).sum()[None]


def _keys() -> Tensor:
    """Return fixed odd numbers, int64 [BLOCK_WORDS]; NumPy keeps this stream the same in all its versions."""
    return torch.from_numpy(np.random.PCG64(0).random_raw(BLOCK_WORDS).view(np.int64) | 1)
