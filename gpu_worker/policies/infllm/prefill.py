"""InfLLM's prefill: some queries at a time attend sinks, the blocks that they look up, and what is near."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_worker.kernels.prefill_attention import attend_chunk
from gpu_worker.policies.base import Plan, PromptAttention
from gpu_worker.policies.infllm.blocks import later_best, local_attention, representatives


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
    block_size: int
    repr_topk: int
    chunk_size: int
    per_head: bool
    # Of the layer that is computed: float32 [H_kv, n].
    _received: Tensor = field(init=False)

    def attend(self, query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
        if begin == 0:
            self._received = torch.zeros(rows.shape[:2], device=rows.device)
        end, parts = begin + query.shape[0], []
        first = begin
        while first < end:
            last = min(end, (first // self.chunk_size + 1) * self.chunk_size)
            parts.append(self._attend_chunk(query[first - begin : last - begin], rows, first, scale))
            first = last
        return torch.cat(parts)

    def _attend_chunk(self, query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
        end, keys = begin + query.shape[0], rows[..., : query.shape[2]]
        index = self._attended(query, keys, begin, end)
        self._received[:, :end] += local_attention(query.transpose(0, 1), keys[:, :end], self.plan, scale)
        if index is None:
            return attend_chunk(query, rows, begin, scale)
        near = rows.gather(1, index[..., None].expand(-1, -1, rows.shape[2]))
        return attend_chunk(query, near, index.shape[1] - query.shape[0], scale)

    def _attended(self, query: Tensor, keys: Tensor, begin: int, end: int) -> Tensor | None:
        """Positions, int64 [H_kv, A], of which the last are the chunk's own; None: all."""
        size, num_best = self.block_size, (self.plan.num_selected or 0) // self.block_size
        # Blocks that have no sink, and that are out of every query's window.
        first = -(-self.plan.num_sink // size)
        stop = max(0, begin + 1 - max(1, self.plan.num_recent)) // size
        if stop - first <= num_best:
            return None
        means, _counts = representatives(self._received[:, : stop * size], keys, self.repr_topk, size)
        mean_query = query.float().mean(dim=0).view(keys.shape[0], -1, keys.shape[2]).mean(dim=1)
        scores = (means[:, first:] @ mean_query[..., None]).squeeze(-1)
        if not self.per_head:
            scores = scores.mean(dim=0, keepdim=True).expand_as(scores)
        blocks = first + later_best(scores, num_best).sort(dim=1).values
        every = torch.arange(end, device=keys.device)
        selected = (blocks[..., None] * size + every[:size]).flatten(1)
        fixed = (every[: first * size], every[stop * size :])
        sinks, near = (part.expand(keys.shape[0], -1) for part in fixed)
        return torch.cat([sinks, selected, near], dim=1)
