"""SnapKV: the prompt's last queries vote for the tokens before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch.nn.functional as F
from torch import Tensor

from gpu_worker.policies.base import Plan
from gpu_worker.policies.hyper_parameters import Between, OneOf, SomeTokens
from gpu_worker.policies.observed import observed_weight
from gpu_worker.policies.retain import LayerRows
from gpu_worker.policies.scored import ScoredPolicy, Scores


@dataclass(frozen=True, slots=True)
class SnapKV(ScoredPolicy):
    """The tokens with the most weight from the last queries (Li et al., SnapKV, section 4).

    Nothing more is evicted while decoding.

    window: last tokens of the prompt, whose queries vote; they are kept, and are at most half of all kept. kernel:
    tokens that share a vote. pooling: "max" or "avg" of their votes.
    """

    window: SomeTokens = 32
    kernel: Annotated[int, Between(1, 1023, is_odd=True)] = 7
    pooling: Annotated[Literal["max", "avg"], OneOf(("max", "avg"))] = "max"

    name = "snapkv"

    def split(self, plan: Plan) -> Plan:
        plan = plan.split_by_number(0, self.window)
        return plan if plan.num_prompt_tokens > plan.num_recent + 1 else plan.attending_all()

    def num_queries(self, plan: Plan) -> int:
        return plan.num_recent if plan.selects else 0

    def score(self, rows: LayerRows, plan: Plan) -> Scores:
        # The group's mean comes before the pooling: a maximum of means is not a mean of maxima.
        votes = observed_weight(rows)
        # Votes for the window itself are none of its neighbours' before it.
        votes[:, votes.shape[1] - plan.num_recent :].fill_(0.0)
        return Scores(self._pool(votes), second=votes)

    def _pool(self, votes: Tensor) -> Tensor:
        if self.pooling == "max":
            return F.max_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2)
        # Beyond the ends there are votes of zero, as in the authors' code.
        return F.avg_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2)
