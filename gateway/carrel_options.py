"""The rules of the extension field `carrel`, the same for REST and gRPC."""

from __future__ import annotations

import math

from gateway.errors import InvalidRequest
from gateway.records import Budget, CarrelOptions, WorkerInfo

BUDGET_RULE = "give a share of the context in (0, 1], or a whole number of tokens from 2 up"
# far above any context, and a safe number in every protocol
MAX_BUDGET_TOKENS = 2**53


def read_budget(value: object) -> Budget:
    """A budget from a number of either kind; 1 and 1.0 are the whole context. Raises ValueError with the rule."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(BUDGET_RULE)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(BUDGET_RULE)
    if 0 < value <= 1:
        return Budget(share=float(value))
    if value < 2 or value != int(value):
        raise ValueError(BUDGET_RULE)
    return Budget(tokens=min(int(value), MAX_BUDGET_TOKENS))


def check_policy(options: CarrelOptions, info: WorkerInfo) -> None:
    """Raises InvalidRequest for a policy that the worker does not know."""
    if options.policy is not None and options.policy not in info.policies:
        raise InvalidRequest(
            f"Unknown policy {options.policy[:50]!r}: choose one of {', '.join(info.policies)}.",
            "carrel.policy",
        )
