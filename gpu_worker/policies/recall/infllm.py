"""InfLLM: a block of past tokens is recalled by the tokens that its neighbours attended most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.policies.base import CacheShape, Plan, attend_all, sink_tokens
from gpu_worker.policies.recall.base import Candidates, RecallPolicy
from gpu_worker.policies.recall.quest import by_token

# 256 MiB of float32: a long prompt's weights are seen some queries at a time.
MAX_WEIGHTS = 1 << 26


@dataclass(frozen=True, slots=True)
class InfLLMIndex:
    """keys: float32 [seats, L, H_kv, P, d], the mean of a block's representatives. counts: int32 [seats, L, H_kv, P],
    how many they are. num_prompt_tokens: int64 [seats]; what leaves the window before that is indexed already. scale:
    of the model's attention."""

    keys: Tensor
    counts: Tensor
    num_prompt_tokens: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class InfLLM(RecallPolicy[InfLLMIndex]):
    """Recall of whole blocks by their representatives (Xiao et al., InfLLM, section 3), after a dense prefill.

    block_size: tokens of a block; block b is of the positions from b * block_size on, less the sinks. repr_topk: how
    many of its tokens represent a block: those that queries with them in their local window attended most; their mean
    is compared with the query. num_sink: the paper's initial tokens. recent_ratio: the share of the rest of the budget
    that goes to the local window, rounded so that whole blocks are left. per_head: each KV head chooses its own blocks;
    else a block's score is the mean over all heads, and all choose the same.

    Unlike the paper's: every query of the prompt attends all before it (the sparse prefill, which the published losses
    include, is not done); positions stay true, no distance is clamped; local attention is measured among sinks and
    window, for a prompt's query has looked no block up; and of the tokens decoded later, whose attention nobody
    measures, each represents its block. Blocks are cut as Quest's pages are.
    """

    block_size: int = 128
    repr_topk: int = 4
    num_sink: int = 128
    recent_ratio: float = 0.5
    per_head: bool = False

    name = "infllm"

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        num_sink = sink_tokens(self.num_sink, budget_tokens)
        rest = budget_tokens - num_sink
        wanted = (rest - int(rest * self.recent_ratio)) // self.block_size
        # One block at least, where there is room for one.
        num_selected = min(max(1, wanted), rest // self.block_size) * self.block_size
        num_recent = rest - num_selected
        if budget_tokens >= num_prompt_tokens:
            return attend_all(num_prompt_tokens, budget_tokens, num_sink, num_recent)
        return Plan(num_prompt_tokens, budget_tokens, num_sink, num_recent, num_selected)

    def num_queries(self, plan: Plan) -> int:
        return plan.num_prompt_tokens if plan.selects else 0

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        return max(plan.num_sink, num_tokens - plan.num_recent)

    def max_window(self, plan: Plan) -> int:
        return plan.num_recent

    def allocate(self, shape: CacheShape) -> InfLLMIndex:
        num_blocks = -(-shape.max_model_len // self.block_size)
        return InfLLMIndex(
            keys=shape.seated(num_blocks, shape.head_dim, dtype=torch.float32),
            counts=shape.seated(num_blocks, dtype=torch.int32),
            num_prompt_tokens=torch.empty(shape.max_num_seqs, dtype=torch.int64, device=shape.device),
            scale=shape.scale,
        )

    def observe_prefill(
        self, index: InfLLMIndex, seat: int, layer: int, plan: Plan, keys: Tensor, queries: Tensor
    ) -> None:
        """Of all blocks, those in the window too: their tokens' attention is known now only."""
        num_kv_heads, num_tokens, head_dim = keys.shape
        num_blocks = -(-num_tokens // self.block_size)
        received = local_attention(queries, keys, plan, index.scale)
        received[:, : plan.num_sink] = float("-inf")
        padding = num_blocks * self.block_size - num_tokens
        padded = torch.nn.functional.pad(received, (0, padding), value=float("-inf"))
        blocks = padded.view(num_kv_heads, num_blocks, self.block_size)
        best = blocks.topk(min(self.repr_topk, self.block_size), dim=2)
        is_token = best.values > float("-inf")
        first = torch.arange(0, num_tokens, self.block_size, device=keys.device)[:, None]
        places = (first + best.indices).clamp(max=num_tokens - 1).flatten(1)
        chosen = keys.gather(1, places[..., None].expand(-1, -1, head_dim)).float()
        total = (chosen.view(*best.indices.shape, head_dim) * is_token[..., None]).sum(dim=2)
        counts = is_token.sum(dim=2)
        index.keys[seat, layer, :, :num_blocks] = total / counts.clamp(min=1)[..., None]
        index.counts[seat, layer, :, :num_blocks] = counts.int()
        index.num_prompt_tokens[seat] = num_tokens

    def extend(
        self, index: InfLLMIndex, seats: Tensor, layers: range, positions: Tensor, keys: Tensor
    ) -> None:
        span, blocks = slice(layers.start, layers.stop), positions.clamp(min=0) // self.block_size
        means, counts = index.keys[:, span], index.counts[:, span]
        old, old_counts = means[seats, :, :, blocks], counts[seats, :, :, blocks]
        # A block that begins here may hold an earlier request's.
        is_first = (positions % self.block_size == 0)[:, None, None]
        num_before = old_counts.masked_fill(is_first, 0)
        before = old.masked_fill(is_first[..., None], 0)
        new = before + (keys.float() - before) / (num_before + 1)[..., None]
        # What was in the prompt is indexed; such a row, or one without a token, writes back what is there.
        is_new = (positions >= 0) & (positions >= index.num_prompt_tokens[seats])
        means[seats, :, :, blocks] = new.where(is_new[:, None, None, None], old)
        counts[seats, :, :, blocks] = (num_before + 1).where(is_new[:, None, None], old_counts)

    def score(self, index: InfLLMIndex, candidates: Candidates) -> Tensor:
        num_blocks = -(-candidates.num_positions // self.block_size)
        keys = index.keys[:, candidates.layer, :, :num_blocks][candidates.seats]
        batch, num_kv_heads, _, head_dim = keys.shape
        query = candidates.query.float().view(batch, num_kv_heads, -1, head_dim).mean(dim=2)
        scores = (keys @ query[..., None]).squeeze(-1)
        if not self.per_head:
            scores = scores.mean(dim=1, keepdim=True).expand_as(scores)
        return by_token(scores, self.block_size, candidates)


def local_attention(queries: Tensor, keys: Tensor, plan: Plan, scale: float) -> Tensor:
    """Weight that each token gets from the queries that have it in their window, summed: float32 [H_kv, n].

    A query attends the sinks and the window, which ends with itself. queries: [H_q, w, d] of the last w tokens. keys:
    [H_kv, n, d].
    """
    (num_heads, num_queries, head_dim), (num_kv_heads, num_tokens, _) = queries.shape, keys.shape
    num_sink, width = plan.num_sink, max(1, plan.num_recent)
    received = torch.zeros(num_kv_heads, num_tokens, device=keys.device)
    every = torch.arange(num_tokens, device=keys.device)
    # No more queries at a time than the window is wide: a tile sees the sinks and less than two windows.
    reach = num_sink + 2 * width
    step = max(1, min(width, MAX_WEIGHTS // (num_heads * reach)))
    for begin in range(num_tokens - num_queries, num_tokens, step):
        end = min(begin + step, num_tokens)
        # The first token that one of them has in its window.
        low = min(max(num_sink, begin - width + 1), end)
        sinks, window = keys[:, : min(num_sink, end)], keys[:, low:end]
        positions = torch.cat([every[: sinks.shape[1]], every[low:end]])
        age = every[begin:end, None] - positions
        hidden = (age < 0) | ((age >= width) & (positions >= num_sink))
        first = begin - (num_tokens - num_queries)
        tile = queries[:, first : first + end - begin].float().reshape(num_kv_heads, -1, head_dim)
        scores = tile @ torch.cat([sinks, window], dim=1).float().transpose(1, 2) * scale
        scores = scores.view(num_kv_heads, -1, *age.shape).masked_fill_(hidden, float("-inf"))
        received[:, low:end] += scores.softmax(dim=-1).sum(dim=(1, 2))[:, sinks.shape[1] :]
    return received
