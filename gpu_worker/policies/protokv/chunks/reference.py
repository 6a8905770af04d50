"""The definition of irregularity and chunk sums, in float32 PyTorch.

Of n keys in k chunks each chunk has floor(n / k), in order, and the last one the rest too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

EPS = 1e-6
# 256 MiB of float32.
MAX_ELEMENTS = 1 << 26


def irregularity(keys: Tensor, num_chunks: int) -> Tensor:
    """How far a key turns away from its chunk's mean, in units of the chunk's spread: float32 [H, n], finite (ProtoKV,
    equation 10).

    keys: [H, n, d]. A chunk with a key that is no number has no irregular ones: 0. Raises ValueError where the chunks
    are not 1 to n."""
    scores = []
    for chunks in _equal_chunks(keys, num_chunks):
        members = chunks.float()
        means = members.mean(dim=2, keepdim=True)
        # The norm of the channels' standard deviations.
        spread = (members - means).square().sum(dim=-1).mean(dim=-1, keepdim=True).sqrt()
        # 1 - cos as half a squared distance: a chunk of equal keys must not be irregular by a rounding error.
        turned = (units(members) - units(means)).square().sum(dim=-1) / 2
        scores.append((turned / spread.clamp(min=EPS)).flatten(1))
    return torch.cat(scores, dim=1).nan_to_num_(nan=0.0)


def chunk_sums(keys: Tensor, num_chunks: int, is_member: Tensor | None = None) -> Tensor:
    """Sums of chunks: float32 [H, k, d] from [H, n, d]. is_member: bool [H, n]; None: all.

    Raises ValueError where the chunks are not 1 to n."""
    if is_member is None:
        is_member = torch.ones(1, 1, dtype=torch.bool, device=keys.device).expand(keys.shape[:2])
    is_member = is_member[..., None].expand_as(keys)
    pairs = zip(_equal_chunks(keys, num_chunks), _equal_chunks(is_member, num_chunks), strict=True)
    return torch.cat([(chunks.float() * members).sum(dim=2) for chunks, members in pairs], dim=1)


def chunk_length(num_rows: int, num_chunks: int) -> int:
    """Rows of every chunk but the last. Raises ValueError where the chunks are not 1 to n."""
    if not 1 <= num_chunks <= num_rows:
        raise ValueError(f"{num_rows} keys make no {num_chunks} chunks: a chunk has at least one")
    return num_rows // num_chunks


def units(vectors: Tensor) -> Tensor:
    """Directions along the last dimension; zero has none and stays zero."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=EPS)


def _equal_chunks(rows: Tensor, num_chunks: int) -> Iterator[Tensor]:
    """Tiles [H, c, length, d] of [H, n, d], some chunks at a time; the last chunk, which takes the rest, alone."""
    num_heads, num_rows, width = rows.shape
    length = chunk_length(num_rows, num_chunks)
    last = (num_chunks - 1) * length
    if last:
        step = max(1, MAX_ELEMENTS // (num_heads * length * width))
        yield from rows[:, :last].unflatten(1, (-1, length)).split(step, dim=1)
    yield rows[:, None, last:]
