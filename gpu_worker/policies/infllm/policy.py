"""InfLLM: a block of past tokens is recalled by the tokens that its neighbours attended most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from gpu_worker.policies.base import CacheShape, Plan, PromptAttention
from gpu_worker.policies.hyper_parameters import Between, SomeTokens, SplitShare, Switch, Tokens
from gpu_worker.policies.infllm.blocks import local_attention, representatives
from gpu_worker.policies.infllm.prefill import BlockPrefill
from gpu_worker.policies.quest.policy import by_token
from gpu_worker.policies.recall import Candidates, Leaving, PrefilledLayer, RecallPolicy


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
    """All tokens; whole blocks by representative tokens (Xiao et al., InfLLM, section 3).

    block_size: tokens of a block; block b is of the positions from b * block_size on, less the sinks. repr_topk: how
    many of its tokens represent a block: those that queries with them in their local window attended most; their mean
    is compared with the query. num_sink: the paper's initial tokens. recent_ratio: the window's share of all other
    attended tokens, rounded so that whole blocks are left. per_head: each KV head chooses its own blocks; else a
    block's score is the mean over all heads, and all choose the same. sparse_prefill: a prompt's queries attend no more
    than sinks, blocks and window either, as in the paper, `chunk_size` of them looking blocks up together; else every
    query of the prompt attends all before it. The name of such a policy ends in `+sparse`.

    There are three differences to the paper. Tokens are attended at their true positions. Local attention is measured
    among sinks and window only. Of the tokens decoded later, whose attention is not measured, each represents its
    block. Blocks are cut as Quest's pages are.
    """

    block_size: Annotated[int, Between(1, 4096)] = 128
    repr_topk: Annotated[int, Between(1, 4096)] = 4
    num_sink: Tokens = 128
    recent_ratio: SplitShare = 0.5
    per_head: Switch = False
    sparse_prefill: bool = False
    chunk_size: SomeTokens = 512

    def __post_init__(self) -> None:
        if self.repr_topk > self.block_size:
            raise ValueError(
                f"repr_topk is {self.repr_topk}; give no more than block_size, {self.block_size}"
            )

    @property
    def name(self) -> str:
        return "infllm" + "+sparse" * self.sparse_prefill

    def split(self, plan: Plan) -> Plan:
        num_sink = plan.sinks(self.num_sink)
        rest = plan.num_kept - num_sink
        wanted = (rest - int(rest * self.recent_ratio)) // self.block_size
        # One block at least, where one fits.
        num_selected = min(max(1, wanted), rest // self.block_size) * self.block_size
        return plan.split(num_sink, rest - num_selected)

    def num_queries(self, plan: Plan) -> int:
        return plan.num_prompt_tokens if plan.selects else 0

    def prompt_attention(self, plan: Plan) -> PromptAttention | None:
        if not self.sparse_prefill:
            return None
        return BlockPrefill(plan, self.block_size, self.repr_topk, self.chunk_size, self.per_head)

    def allocate(self, shape: CacheShape) -> InfLLMIndex:
        num_blocks = -(-shape.max_model_len // self.block_size)
        return InfLLMIndex(
            keys=shape.seated(num_blocks, shape.head_dim, dtype=torch.float32, tokens_each=self.block_size),
            counts=shape.seated(num_blocks, dtype=torch.int32, tokens_each=self.block_size),
            num_prompt_tokens=torch.empty(shape.num_seats, dtype=torch.int64, device=shape.device),
            scale=shape.scale,
        )

    def observe_prefill(self, index: InfLLMIndex, prefilled: PrefilledLayer) -> None:
        """Index all blocks, including those in the window: their tokens' attention is known only now."""
        seat, layer, keys = prefilled.seat, prefilled.layer, prefilled.keys
        received = local_attention(prefilled.queries, keys, prefilled.plan, index.scale)
        received[:, : prefilled.plan.num_sink] = float("-inf")
        means, counts = representatives(received, keys, self.repr_topk, self.block_size)
        index.keys[seat, layer, :, : means.shape[1]] = means
        index.counts[seat, layer, :, : means.shape[1]] = counts.int()
        index.num_prompt_tokens[seat] = keys.shape[1]

    def extend(self, index: InfLLMIndex, leaving: Leaving) -> None:
        positions, size = leaving.positions, self.block_size
        # A block that begins here may hold an earlier request's.
        is_first = (positions % size == 0)[:, None, None]
        num_before = leaving.read(index.counts, size).masked_fill(is_first, 0)
        before = leaving.read(index.keys, size).masked_fill(is_first[..., None], 0)
        new = before + (leaving.read_keys().float() - before) / (num_before + 1)[..., None]
        # What was in the prompt is indexed.
        is_new = positions >= index.num_prompt_tokens[leaving.seats]
        leaving.write(index.keys, new, size, is_new)
        leaving.write(index.counts, num_before + 1, size, is_new)

    def score(self, index: InfLLMIndex, candidates: Candidates) -> Tensor:
        num_blocks = -(-candidates.num_positions // self.block_size)
        keys = index.keys[:, candidates.layer, :, :num_blocks][candidates.seats]
        batch, num_kv_heads, _, head_dim = keys.shape
        query = candidates.query.float().view(batch, num_kv_heads, -1, head_dim).mean(dim=2)
        scores = (keys @ query[..., None]).squeeze(-1)
        if not self.per_head:
            scores = scores.mean(dim=1, keepdim=True).expand_as(scores)
        return by_token(scores, self.block_size, candidates)
