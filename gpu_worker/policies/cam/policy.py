"""CaM: a sliding window in which a token that leaves bequeaths its value to those behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_worker.policies.base import Plan, StepAttention
from gpu_worker.policies.hyper_parameters import Between, SomeTokens
from gpu_worker.policies.observed import observed_weight
from gpu_worker.policies.retain import Evicted, Gift, KeptStep, LayerRows, Observing, Retained, StepSlots
from gpu_worker.policies.scored import Scores, keep_best
from gpu_worker.policies.streaming_llm.policy import StreamingLLM

# Blocks of evicted tokens that are solved together; a power of two.
MAX_BLOCKS = 512
BITS_32 = 0xFFFFFFFF
Bits = TypeVar("Bits", int, Tensor)


@dataclass(frozen=True, slots=True)
class CaM(StreamingLLM):
    """Sinks and a window, older values merged into later ones (Zhang et al., CaM, section 4).

    Token i leaves as in StreamingLLM, but gives its value to the next m tokens, a share 1/m to each, with probability
    min(1, a_i / mean of a over the window), where a are the latest query's attention weights.

    num_sink: as for StreamingLLM. merge_size: m. window_size: the prompt's last queries, whose summed weights decide
    for all of its tokens. seed: of the coins; a request's own is added at prefill.

    The prompt's tokens leave one by one in the order of their positions, as if they had been decoded: what one passes
    on holds what it was given by those that left before it. The share is 1/m also where the window is shorter than m.
    """

    merge_size: Annotated[int, Between(1, 1024)] = 32
    window_size: SomeTokens = 32
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0

    name = "cam"
    key_copies = 7

    def num_queries(self, plan: Plan) -> int:
        return min(self.window_size, plan.num_prompt_tokens)

    def keep(self, rows: LayerRows, plan: Plan) -> Retained:
        weights = observed_weight(rows)
        # All of the window, and nothing between it and the sinks.
        retained = keep_best(rows, plan, Scores(weights, notes=weights))
        leaving = slice(plan.num_sink, rows.num_tokens - plan.num_recent)
        reach = min(self.merge_size, plan.num_recent)
        if reach == 0:
            return retained
        mean = weights[:, leaving.stop :].mean(dim=1, keepdim=True)
        heads = torch.arange(weights.shape[0], device=weights.device)
        coins = uniform(self.seed + rows.seed, rows.positions[:, leaving], heads[:, None], rows.layer)
        share = (coins * mean < weights[:, leaving]).float() / self.merge_size
        values = retained.values.float()
        values[:, plan.num_sink : plan.num_sink + reach] += bequest(rows.values[:, leaving], share, reach)
        return replace(retained, values=values.to(rows.values.dtype))

    def evict(self, slots: StepSlots) -> Evicted:
        evicted = super(CaM, self).evict(slots).slots
        return Evicted(evicted, self.gift(slots, evicted))

    def gift(self, slots: StepSlots, evicted: Tensor) -> Gift:
        """Return the values that the evicted slots, int64 [B, L, H_kv], pass on."""
        if slots.notes is None:
            raise ValueError("CaM gives by what it has observed: give StepSlots.notes")
        positions, device = slots.positions, evicted.device
        _, num_layers, num_heads, width = positions.shape
        place = evicted[..., None]
        is_recent = positions >= slots.end[:, None, None, None]
        mean = (slots.notes * is_recent).sum(dim=-1) / is_recent.sum(dim=-1).clamp(min=1)
        left = positions.gather(-1, place)
        heads, layers = torch.arange(num_heads, device=device), torch.arange(num_layers, device=device)
        # Below a_i / mean, without the quotient, which may not exist.
        is_given = uniform(self.seed, left[..., 0], heads, layers[:, None]) * mean
        is_given = is_given < slots.notes.gather(-1, place)[..., 0]
        # The j-th token behind the one that leaves goes to column j, all others to one that is cut off.
        ahead = positions - left - 1
        is_heir = (ahead >= 0) & (ahead < self.merge_size) & slots.is_evictable.gather(-1, place)
        heirs = positions.new_full((*evicted.shape, self.merge_size + 1), -1)
        heirs.scatter_(
            -1,
            ahead.masked_fill(~is_heir, self.merge_size),
            torch.arange(width, device=device).expand_as(ahead),
        )
        return Gift(heirs[..., :-1], is_given.float() / self.merge_size)

    def attention(self, step: KeptStep) -> StepAttention:
        return Observing(step, self.observe)

    @staticmethod
    def observe(notes: Tensor, weights: Tensor, marks: Tensor) -> None:
        notes.copy_(weights)


def bequest(values: Tensor, share: Tensor, reach: int) -> Tensor:
    """Return what a run of tokens adds to the first `reach` positions behind it: float32 [H, reach, d].

    values: [H, e, d]. share: float32 [H, e]. From the first to the last, token i adds share_i of its value, as it is
    by then, to the values at i + 1, ..., i + reach.
    """
    # y_i is the share of a value by the time it leaves. Of a block of `reach` tokens,
    #   y = share * (values + before @ y + after @ y of the previous block),
    # a triangular system for y. It makes y an affine map of the previous block's; maps are composed in pairs.
    num_heads, num_tokens, head_dim = values.shape
    num_blocks = min(MAX_BLOCKS, 1 << (num_tokens // reach).bit_length())
    size = num_blocks * reach
    ones = torch.ones(reach, reach, device=values.device)
    before, after = ones.tril(-1), ones.triu()
    given = torch.zeros(num_heads, reach, head_dim, device=values.device)
    for end in range(num_tokens % size, num_tokens + 1, size):
        begin = max(0, end - size)
        missing = size - (end - begin)
        shares = pad(share[:, begin:end], (missing, 0)).view(num_heads, num_blocks, reach, 1)
        own = pad(values[:, begin:end].float(), (0, 0, missing, 0)).view(num_heads, num_blocks, reach, -1)
        right = shares * torch.cat([after.expand(num_heads, num_blocks, -1, -1), own], dim=-1)
        system = torch.eye(reach, device=values.device) - shares * before
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        factor, offset = solved.split([reach, head_dim], dim=-1)
        while factor.shape[1] > 1:
            later = factor[:, 1::2]
            offset = offset[:, 1::2] + later @ offset[:, ::2]
            factor = later @ factor[:, ::2]
        given = offset[:, 0] + factor[:, 0] @ given
    return after @ given


def uniform(seed: int, positions: Tensor, *keys: Tensor | int) -> Tensor:
    """A number in [0, 1) for these integers, which broadcast: float32, the same wherever and whenever it is asked for.

    A generator has a state, and a captured step cannot advance it for one sequence alone.
    """
    bits = _mix((positions + _mix(seed & BITS_32)) & BITS_32)
    for key in keys:
        bits = _mix((bits + key + 0x9E3779B9) & BITS_32)
    return (bits >> 8) / 2**24


def _mix(bits: Bits) -> Bits:
    """A bijection of 32 bits (constants of C. Wellons' hash prospector); no product exceeds 63 bits."""
    bits = ((bits ^ (bits >> 16)) * 0x21F0AAAD) & BITS_32
    bits = ((bits ^ (bits >> 15)) * 0x735A2D97) & BITS_32
    return bits ^ (bits >> 15)
