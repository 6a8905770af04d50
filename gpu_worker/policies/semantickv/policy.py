"""SemanticKV: the prompt's queries of largest norm and its last ones vote on what is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from gpu_worker.kernels.best_rows import best_rows
from gpu_worker.policies.base import Plan
from gpu_worker.policies.hyper_parameters import Between, Share, Tokens
from gpu_worker.policies.observed import group_mean, observed_weight, weight_tiles
from gpu_worker.policies.retain import LayerRows
from gpu_worker.policies.rounding import rounded
from gpu_worker.policies.scored import ScoredPolicy, Scores, finite


@dataclass(frozen=True, slots=True)
class SemanticKV(ScoredPolicy):
    """Tokens that recent and large-norm queries weigh most (Huang et al., SemanticKV, sections IV-A and IV-B).

    num_sink: first tokens kept. recent_share: of the prompt, its last tokens, which are kept and vote (SK-A2).
    semantic_share: of the prompt, each query head's queries of largest norm, which vote too. kernel: tokens that share
    the largest of their scores, odd, as SnapKV pools them; 1: none do, as in the paper. Four ablations, the rows
    of the paper's Table II, by False: reserve_sinks and reserve_recent, whether these tokens are kept whatever their
    scores (recent ones vote all the same); by_norm, whether semantic queries are those of largest norm or as many at
    random; head_wise, whether each KV head keeps tokens of its own, or a layer's heads share them by their mean
    score (SK-A4). count_corrected: divide a token's votes by the voters that can see it rather than by all (SK-A3).
    The name says which of the five are not as here.
    """

    num_sink: Tokens = 256
    recent_share: Share = 0.01
    semantic_share: Share = 0.01
    kernel: Annotated[int, Between(1, 1023, is_odd=True)] = 1
    reserve_sinks: bool = True
    reserve_recent: bool = True
    by_norm: bool = True
    head_wise: bool = True
    count_corrected: bool = False

    @property
    def name(self) -> str:
        parts = (
            "+no_sinks" * (not self.reserve_sinks),
            "+no_recent" * (not self.reserve_recent),
            "+random" * (not self.by_norm),
            "+shared" * (not self.head_wise),
            "+corrected" * self.count_corrected,
        )
        return "".join(("semantickv", *parts))

    def split(self, plan: Plan) -> Plan:
        num_recent = self._num_recent_voters(plan.num_prompt_tokens) * self.reserve_recent
        return plan.split_by_number(self.num_sink * self.reserve_sinks, num_recent)

    def num_queries(self, plan: Plan) -> int:
        # A query of large norm may be anywhere in the prompt.
        return plan.num_prompt_tokens if plan.selects else 0

    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        is_voter = self.voters(rows)
        # As many as any head may have, a number that needs no wait for the device.
        most = math.ceil(self.semantic_share * rows.num_tokens) + self._num_recent_voters(rows.num_tokens)
        voters = listed(is_voter, min(most, is_voter.shape[1]))
        if self.count_corrected:
            scores = self._corrected(rows, is_voter, voters)
        else:
            scores = observed_weight(rows, voters, num_queries=is_voter.sum(dim=1))
        if not self.head_wise:
            scores = scores.mean(dim=0, keepdim=True).expand_as(scores)
        if self.kernel > 1:
            scores = max_pool1d(scores, self.kernel, stride=1, padding=self.kernel // 2)
        return Scores(scores)

    @staticmethod
    def _corrected(rows: LayerRows, is_voter: Tensor, voters: Tensor) -> Tensor:
        """Votes for each token over the voters that see it: float32 [H_kv, n]."""
        num_kv_heads, num_tokens, _ = rows.keys.shape
        votes = torch.zeros(is_voter.shape[0], num_tokens, device=rows.keys.device)
        for weights, positions in weight_tiles(rows, voters):
            votes += ((positions >= 0).float()[:, None] @ weights)[:, 0]
        of_window = pad(is_voter.int(), (num_tokens - is_voter.shape[1], 0))
        seen_by = of_window.flip(1).cumsum(dim=1).flip(1)
        return group_mean(votes / seen_by.clamp(min=1), num_kv_heads)

    def voters(self, rows: LayerRows) -> Tensor:
        """Which queries vote: bool [H_q, w]."""
        # Rotation changes no norm, but for rounding: the first layer's queries of one token are equally long wherever
        # it stands, and which of them vote must not be up to the last bit.
        strength = rounded(torch.linalg.vector_norm(rows.queries, dim=-1, dtype=torch.float32))
        if not self.by_norm:
            generator = torch.Generator().manual_seed((rows.seed * rows.num_layers + rows.layer) % 2**64)
            strength = torch.rand(strength.shape, generator=generator).to(strength.device)
        strength = finite(strength)
        num_semantic = min(math.ceil(self.semantic_share * rows.num_tokens), strength.shape[1])
        is_voter = torch.zeros_like(strength, dtype=torch.bool)
        counts = torch.full_like(strength[:, 0], num_semantic, dtype=torch.int64)
        is_voter.scatter_(1, best_rows(strength, counts, num_semantic), True)
        is_voter[:, -self._num_recent_voters(rows.num_tokens) :] = True
        return is_voter

    def _num_recent_voters(self, num_prompt_tokens: int) -> int:
        return max(1, int(self.recent_share * num_prompt_tokens))


def listed(is_there: Tensor, width: int) -> Tensor:
    """Where each row is True: int64 [H, width] from bool [H, w], ascending, then -1. None may have more than that."""
    num_heads, num_places = is_there.shape
    place = is_there.cumsum(dim=1).sub_(1).masked_fill_(~is_there, width)
    index = place.new_full((num_heads, width + 1), -1)
    every = torch.arange(num_places, device=place.device).expand(num_heads, -1)
    # All that are False share a column that is cut off.
    return index.scatter_(1, place, every)[:, :width]
