"""InfLLM's prefill: some queries at a time attend sinks, the blocks that they look up, and what is near."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_worker.kernels.prefill_attention import attend_chunk
from gpu_worker.models import KeyShift
from gpu_worker.policies.base import Plan, PromptAttention
from gpu_worker.policies.infllm.blocks import MAX_WEIGHTS, local_attention, representatives


@dataclass(slots=True)
class BlockPrefill(PromptAttention):
    """Attention of a prompt's queries, at most `chunk_size` at a time, which look blocks up by their mean (Xiao et al.,
    InfLLM, section 3).

    What they attend: sinks, and what the block has that these end in; the best blocks of those that lie wholly before
    the window of the first of them; and all from there on, each query up to itself. Of blocks there are as many as the
    plan selects, and where there are no more the prompt is attended densely. A block's representatives are those that
    the queries so far attended most while they had them in their window, every one's window having passed by then.
    """

    plan: Plan
    scale: float
    block_size: int
    repr_topk: int
    chunk_size: int
    per_head: bool
    # Where distances are clamped.
    key_shift: KeyShift | None = None
    # Of the layer that is computed: float32 [H_kv, n].
    _received: Tensor = field(init=False)

    def attend(self, query: Tensor, rows: Tensor, begin: int) -> Tensor:
        if begin == 0:
            self._received = torch.zeros(rows.shape[:2], device=rows.device)
        end, parts = begin + query.shape[0], []
        first = begin
        while first < end:
            last = min(end, (first // self.chunk_size + 1) * self.chunk_size)
            parts.append(self._attend_chunk(query[first - begin : last - begin], rows, first))
            first = last
        return torch.cat(parts)

    def _attend_chunk(self, query: Tensor, rows: Tensor, begin: int) -> Tensor:
        end, keys = begin + query.shape[0], rows[..., : query.shape[2]]
        index = self._attended(query, keys, begin, end)
        self._received[:, :end] += local_attention(
            query.transpose(0, 1), keys[:, :end], self.plan, self.scale
        )
        if self.key_shift is not None:
            return self._attend_clamped(query, rows, begin, index, self.key_shift)
        if index is None:
            return attend_chunk(query, rows, begin, self.scale)
        near = rows.gather(1, index[..., None].expand(-1, -1, rows.shape[2]))
        return attend_chunk(query, near, index.shape[1] - query.shape[0], self.scale)

    def _attended(self, query: Tensor, keys: Tensor, begin: int, end: int) -> Tensor | None:
        """Positions, int64 [H_kv, A], of which the last are the chunk's own; None: all."""
        size, num_best = self.block_size, (self.plan.num_selected or 0) // self.block_size
        # Blocks that have no sink, and that are out of every query's window.
        first = -(-self.plan.num_sink // size)
        stop = max(0, begin + 1 - max(1, self.plan.num_recent)) // size
        if stop - first <= num_best:
            return None
        means, _counts = representatives(
            self._received[:, : stop * size], keys, self.repr_topk, size, self.key_shift
        )
        if self.key_shift is not None:
            query = self._far(query, begin, self.key_shift)
        mean_query = query.float().mean(dim=0).view(keys.shape[0], -1, keys.shape[2]).mean(dim=1)
        scores = (means[:, first:] @ mean_query[..., None]).squeeze(-1)
        if not self.per_head:
            scores = scores.mean(dim=0, keepdim=True).expand_as(scores)
        blocks = first + scores.topk(num_best, dim=1).indices.sort(dim=1).values
        every = torch.arange(end, device=keys.device)
        selected = (blocks[..., None] * size + every[:size]).flatten(1)
        fixed = (every[: first * size], every[stop * size :])
        sinks, near = (part.expand(keys.shape[0], -1) for part in fixed)
        return torch.cat([sinks, selected, near], dim=1)

    def _far(self, query: Tensor, begin: int, key_shift: KeyShift) -> Tensor:
        """Queries [T, H_q, d] as far from any key without rotation as their windows reach."""
        positions = torch.arange(begin, begin + query.shape[0], device=query.device)
        return key_shift.apply(query.float(), (self.plan.num_recent - positions)[:, None])

    def _attend_clamped(
        self, query: Tensor, rows: Tensor, begin: int, index: Tensor | None, key_shift: KeyShift
    ) -> Tensor:
        """Of tokens at `index` (None: all up to the chunk's end), none farther away than a window reaches; a KV head
        and a few queries at a time."""
        (num_queries, _, head_dim), num_kv_heads = query.shape, rows.shape[0]
        if index is None:
            index = torch.arange(begin + num_queries, device=query.device).expand(num_kv_heads, -1)
        far = self._far(query, begin, key_shift).unflatten(1, (num_kv_heads, -1))
        grouped = query.float().unflatten(1, (num_kv_heads, -1))
        output = torch.empty_like(grouped)
        step = max(1, MAX_WEIGHTS // (grouped.shape[2] * index.shape[1]))
        for head, positions in enumerate(index):
            taken = rows[head, positions].float()
            keys, values = taken[:, :head_dim], taken[:, head_dim:]
            bare = key_shift.apply(keys, -positions)
            for first in range(0, num_queries, step):
                tile = slice(first, first + step)
                age = (
                    torch.arange(begin, begin + num_queries, device=keys.device)[tile, None, None] - positions
                )
                scores = torch.where(
                    age > self.plan.num_recent, far[tile, head] @ bare.T, grouped[tile, head] @ keys.T
                )
                weights = (scores * self.scale).masked_fill_(age < 0, float("-inf")).softmax(dim=-1)
                output[tile, head] = weights @ values
        return output.flatten(1, 2).to(query.dtype)
