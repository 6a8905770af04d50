"""The definition of matching and merging, in float32 PyTorch: every second row seeks the most similar row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

# Cosines are distinguished by 2**-12, about what 16-bit keys say. In the first layer the same two tokens at the same
# distance are equally alike wherever they stand, and the last bit of a sum must not decide which of them merge.
STEPS = 1 << 12


@dataclass(frozen=True, slots=True)
class Matches:
    """source: int64 [A], the 1st, 3rd, ... row of each chunk, ascending; where a chunk is one row only, it is left out.
    partner: int64 [H, A], of the chunk's other rows the one with the highest cosine, the first where they tie.
    similarity: float32 [H, A], that cosine, in steps of 2**-12, by which it is the highest too.
    """

    source: Tensor
    partner: Tensor
    similarity: Tensor


@dataclass(frozen=True, slots=True)
class WeightedRows:
    """Some rows of every head by ascending position. positions: int64 [H, M]. degrees: float32 [H, M], how many tokens
    a row stands for. keys, values: [H, M, d] of one type."""

    positions: Tensor
    degrees: Tensor
    keys: Tensor
    values: Tensor

    @property
    def device(self) -> torch.device:
        return self.keys.device


def num_matches(num_rows: int, chunk: int) -> int:
    """Rows that have a partner."""
    num_full, rest = divmod(num_rows, chunk)
    # The odd row of a chunk seeks a partner too (CH-A7).
    return num_full * ((chunk + 1) // 2) + (0 if rest == 1 else (rest + 1) // 2)


def check_merged(num_rows: int, chunk: int, num_merged: int) -> None:
    """Raises ValueError where so many rows have no partner."""
    most = num_matches(num_rows, chunk)
    if not 0 <= num_merged <= most:
        raise ValueError(
            f"{num_merged} rows cannot merge: of {num_rows} in chunks of {chunk}, {most} have a partner"
        )


# 256 MiB of float32: a long context is matched some chunks, or some rows of one chunk, at a time.
MAX_SIMILARITIES = 1 << 26


def match_rows(keys: Tensor, chunk: int, max_similarities: int = MAX_SIMILARITIES) -> Matches:
    """Match rows [H, M, d] with others of their chunk. The last chunk may be shorter (Hu et al., Chelsea, section 5.2:
    the split that alternates is the best one where similarity falls with distance, convexly)."""
    num_heads, num_rows, _ = keys.shape
    num_chunks = -(-num_rows // chunk)
    keys = keys.float()
    unit = keys / keys.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    unit = pad(unit, (0, 0, 0, num_chunks * chunk - num_rows)).unflatten(1, (num_chunks, chunk))
    rows = torch.arange(num_chunks * chunk, device=keys.device).view(num_chunks, chunk)
    seeking, offered, is_padding = unit[:, :, 0::2], unit[:, :, 1::2], rows[:, 1::2] >= num_rows
    num_seeking, num_offered = seeking.shape[2], offered.shape[2]
    similarity = torch.empty(num_heads, num_chunks, num_seeking, device=keys.device)
    partner = torch.empty_like(similarity, dtype=torch.int64)
    chunk_step = max(1, max_similarities // (num_heads * num_seeking * num_offered))
    row_step = max(1, max_similarities // (num_heads * chunk_step * num_offered))
    for first_chunk in range(0, num_chunks, chunk_step):
        chunks = slice(first_chunk, first_chunk + chunk_step)
        for first_row in range(0, num_seeking, row_step):
            tile = slice(first_row, first_row + row_step)
            cosines = (STEPS * seeking[:, chunks, tile] @ offered[:, chunks].transpose(2, 3)).round_()
            cosines.masked_fill_(is_padding[chunks, None], float("-inf"))
            similarity[:, chunks, tile], partner[:, chunks, tile] = cosines.max(dim=-1)
    similarity /= STEPS
    # The rows at 1, 3, ... of a chunk are those on offer.
    partner = rows[:, :1] + 2 * partner + 1
    # Padding, and a row alone in its chunk, come last.
    matched = num_matches(num_rows, chunk)
    return Matches(
        rows[:, 0::2].flatten()[:matched], partner.flatten(1)[:, :matched], similarity.flatten(1)[:, :matched]
    )


def merge_rows(
    rows: WeightedRows, chunk: int, num_merged: int, dtype: torch.dtype = torch.float32
) -> WeightedRows:
    """A round: of each head, merge so many rows into their partners, those that are most like them; of equally similar
    ones, the higher row goes first. Means are weighted by degrees, made in float32 from rows of any type, and stand
    where the partner stood (CH-A6).

    dtype: of the keys and values that are returned, [H, M - num_merged, d]. Raises ValueError where fewer rows have a
    partner."""
    check_merged(rows.keys.shape[1], chunk, num_merged)
    keys, values = rows.keys.float(), rows.values.float()
    matches = match_rows(keys, chunk)
    # Stable from the end: a tie goes to the higher row.
    order = matches.similarity.flip(1).argsort(dim=1, descending=True, stable=True)[:, :num_merged]
    best = matches.similarity.shape[1] - 1 - order
    source, target = matches.source[best], matches.partner.gather(1, best)
    gained = rows.degrees.gather(1, source)
    degrees = rows.degrees.scatter_add(1, target, gained)
    num_heads, num_rows = degrees.shape
    # One bag a row, of what is merged into it. Its sum has an order, as that of a scatter on a GPU has not.
    first = torch.arange(num_heads, device=source.device)[:, None] * num_rows
    into, order = (target + first).flatten().sort(stable=True)
    bags = torch.searchsorted(into, torch.arange(num_heads * num_rows, device=into.device))
    members = (source + first).flatten()[order]
    shares = (gained / degrees.gather(1, target)).flatten()[order]
    own_share = (rows.degrees / degrees)[..., None]

    def mean(of: Tensor) -> Tensor:
        flat = of.flatten(0, 1)
        added = embedding_bag(members, flat, bags, mode="sum", per_sample_weights=shares)
        return of * own_share + added.view_as(of)

    stays = torch.ones_like(degrees, dtype=torch.bool).scatter_(1, source, False)
    survivors = stays.nonzero()[:, 1].view(num_heads, -1)
    wide = survivors[..., None].expand(-1, -1, keys.shape[2])
    return WeightedRows(
        rows.positions.gather(1, survivors),
        degrees.gather(1, survivors),
        mean(keys).gather(1, wide).to(dtype),
        mean(values).gather(1, wide).to(dtype),
    )
