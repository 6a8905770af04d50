"""The oracle's exact weights need every key. What it selects by them is tested through the engine."""

from __future__ import annotations

import pytest
import torch
from policy_index import queries_of

from gpu_worker.policies.oracle.policy import Oracle
from gpu_worker.policies.recall import Candidates


def test_the_oracle_refuses_to_score_without_keys() -> None:
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(LookupError, match="exact keys"):
        Oracle().score(None, Candidates(0, queries_of(torch.zeros(1, 6, 8)), one, one, one, 1, 1.0))
