"""Bipartite soft matching within chunks: every second row looks for the row that is most like it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# 256 MiB of float32: a long context is matched some chunks, or some rows of one chunk, at a time.
MAX_SIMILARITIES = 1 << 26
# Cosines are told apart by 2**-12, about what 16-bit keys say. In the first layer the same two tokens at the same
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


def num_matches(num_rows: int, chunk: int) -> int:
    """Rows that have a partner."""
    num_full, rest = divmod(num_rows, chunk)
    # The odd row of a chunk seeks a partner too (CH-A7).
    return num_full * ((chunk + 1) // 2) + (0 if rest == 1 else (rest + 1) // 2)


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
