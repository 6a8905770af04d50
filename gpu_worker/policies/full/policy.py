"""Dense attention: the reference for quality and for speed."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.policies.base import Family, Plan, Policy, attend_all


@dataclass(frozen=True, slots=True)
class Full(Policy):
    """All tokens, in slots; each step attends all of them."""

    name = "full"
    family = Family.DENSE

    def split(self, plan: Plan) -> Plan:
        return attend_all(plan.num_prompt_tokens, plan.num_prompt_tokens, num_sink=0, num_recent=0)
